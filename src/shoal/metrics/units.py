"""Numbers for people in the unit that suits them: 12 B, 3.4 MB, 65 GB; three digits are enough to compare."""

BYTES = (" B", " kB", " MB", " GB", " TB")


def size(size_bytes: float) -> str:
    return scaled(size_bytes, BYTES)


def scaled(value: float, units: tuple[str, ...]) -> str:
    """In the unit that leaves fewer than four digits before the point."""
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    digits = 1 if power and abs(value) < 99.95 else 0
    return f"{value:.{digits}f}{units[power]}"
