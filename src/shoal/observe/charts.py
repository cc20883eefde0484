"""Small charts out of characters: a curve in braille dots, and bars.

Pure: points and a size in, lines of text of exactly that size out. A braille character is 2 dots wide and 4 high.
"""

from collections.abc import Iterable, Sequence

from shoal.observe.series import Point

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
BLANK = 0x2800
EIGHTHS = " ▏▎▍▌▋▊▉█"


class Canvas:
    """Dots with (0, 0) at the lower left."""

    def __init__(self, columns: int, rows: int) -> None:
        self.width, self.height = columns * 2, rows * 4
        self._cells = [[BLANK] * columns for _ in range(rows)]

    def dot(self, x: int, y: int) -> None:
        down = self.height - 1 - y
        self._cells[down // 4][x // 2] |= DOTS[x % 2][down % 4]

    def line(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        (x0, y0), (x1, y1) = start, end
        length = max(abs(x1 - x0), abs(y1 - y0), 1)
        for part in range(length + 1):
            self.dot(round(x0 + (x1 - x0) * part / length), round(y0 + (y1 - y0) * part / length))

    def lines(self) -> list[str]:
        return ["".join(map(chr, row)) for row in self._cells]


def curve(
    points: Sequence[Point], columns: int, rows: int, *, x_range: tuple[float, float], y_range: tuple[float, float]
) -> list[str]:
    """A connected line through the points, clamped to the ranges."""
    canvas = Canvas(columns, rows)
    placed = [
        (_place(x, x_range, canvas.width), _place(y, y_range, canvas.height))
        for x, y in sorted(points)
        if x_range[0] <= x <= x_range[1]
    ]
    for start, end in zip(placed[:1] + placed, placed, strict=False):
        canvas.line(start, end)
    return canvas.lines()


def bar(value: float, largest: float, columns: int) -> str:
    """A horizontal bar in eighths of a character; anything above nothing is visible."""
    if value <= 0 or largest <= 0:
        return ""
    eighths = max(1, round(min(value / largest, 1.0) * columns * 8))
    return EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def value_range(values: Iterable[float], low: float, high: float) -> tuple[float, float]:
    """The range of the values, at least low … high."""
    known = list(values)
    return min([low, *known]), max([high, *known])


def _place(value: float, within: tuple[float, float], dots: int) -> int:
    low, high = within
    share = (value - low) / (high - low) if high > low else 0.0
    return round(min(max(share, 0.0), 1.0) * (dots - 1))
