"""Numbers for people in the unit that suits them: 12 B, 3.4 MB, 65 GB; three digits are enough to compare."""

BYTES = (" B", " kB", " MB", " GB", " TB")


def size(size_bytes: float) -> str:
    return scaled(size_bytes, BYTES)


MEMORY = ("B", "KiB", "MiB", "GiB", "TiB")


def memory(size_bytes: float) -> str:
    """As machines are sold: 70.60 GiB, 1.40 MiB."""
    power = 0
    while abs(size_bytes) >= 1000 and power < len(MEMORY) - 1:
        size_bytes, power = size_bytes / 1024, power + 1
    return f"{size_bytes:.2f} {MEMORY[power]}"


def scaled(value: float, units: tuple[str, ...]) -> str:
    """In the unit that leaves fewer than four digits before the point."""
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    digits = 1 if power and abs(value) < 99.95 else 0
    return f"{value:.{digits}f}{units[power]}"
