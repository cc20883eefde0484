"""Markdown that fits the width of the docs."""

import re
import textwrap

WIDTH = 100


def wrapped(text: str, indent: str = "", width: int = WIDTH) -> str:
    """One paragraph; code spans stay whole where they fit a line."""
    spans: list[str] = []

    def keep(match: re.Match[str]) -> str:
        spans.append(match.group())
        return f"\x00{len(spans) - 1:0{max(len(match.group()) - 2, 1)}d}\x01"

    flat = " ".join(text.split())
    held = re.sub(r"`[^`]{1,80}`", keep, flat)
    lines = textwrap.wrap(
        held, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return re.sub(r"\x00(\d+)\x01", lambda match: spans[int(match.group(1))], "\n".join(lines))


def item(text: str, width: int = WIDTH) -> str:
    """One entry of a list."""
    return "- " + wrapped(text, indent="  ", width=width).lstrip()


def table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
