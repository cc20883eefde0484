"""Numbers and untrusted text for people: short, aligned, and harmless to a terminal.

Names, activities and reasons come from untrusted machines; `printable` keeps their control characters, and so
their escape sequences, out of whatever shows them.
"""

from shoal.metrics.units import scaled

REPLACEMENT = "\ufffd"
ELLIPSIS = "…"


def printable(text: str, limit: int = 200) -> str:
    """One line without control characters, at most `limit` characters."""
    line = " ".join(text.split())
    clean = "".join(character if character.isprintable() else REPLACEMENT for character in line)
    return clean if len(clean) <= limit else clean[: limit - 1] + ELLIPSIS


def duration(seconds: float) -> str:
    """`4:05`, or `1:04:05` from an hour on."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def count(number: float) -> str:
    return scaled(number, ("", "k", "M", "G", "T"))


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
