"""A text editor in a small terminal window: keys in, frames out. A pure state machine.

Text is lines of code points below 128, without control characters. The window follows the cursor with the smallest scroll,
so a frame is a function of the start text and the keys since then. The cursor is drawn as code point 5 over the cell that it
is on. A key that cannot act (left at the start of the text, say) changes nothing.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ShoalError

Frame = NDArray[np.uint8]

BLANK, CURSOR, CODE_POINTS = 32, 5, 128
UP, DOWN, RIGHT, LEFT = "\x11", "\x12", "\x13", "\x14"
PAGE_UP, PAGE_DOWN = "\x0e", "\x0f"
HOME, END = "\x02", "\x03"
BACKSPACE, DELETE, ENTER = "\x08", "\x7f", "\n"
SAVE = "\x04"
"""Ends a session."""
ARROWS = (UP, DOWN, RIGHT, LEFT)
MOVES = (*ARROWS, PAGE_UP, PAGE_DOWN, HOME, END)
TAB_WIDTH = 4
UNSHOWN = re.compile(r"[^ -~\n]")


class TextError(ShoalError):
    """Text that an editor of ASCII cannot hold."""

    code = "frame_text"
    permanent = True


def lines_of(text: str) -> list[str]:
    """The lines of a text; tabs become spaces. Refuses what has no cell of its own."""
    plain = text.replace("\r\n", "\n").expandtabs(TAB_WIDTH)
    if (wrong := UNSHOWN.search(plain)) is not None:
        line = plain.count("\n", 0, wrong.start()) + 1
        raise TextError(f"Line {line} has the character {wrong[0]!r}; frames show printable ASCII only.")
    return plain.split("\n")


def is_printable(sign: str) -> bool:
    return " " <= sign <= "~"


@dataclass
class Editor:
    """Lines, cursor and window; `press` changes them, `frame` shows them."""

    rows: int
    columns: int
    lines: list[str] = field(default_factory=lambda: [""])
    line: int = 0
    column: int = 0
    top: int = 0
    left: int = 0
    saved: bool = False

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise TextError(f"A window of {self.rows} × {self.columns} cells shows nothing.")

    def press(self, key: str) -> None:
        """One key: a printable character, or one of the keys above. Any other is ignored, as a terminal would."""
        if is_printable(key):
            self._insert(key)
        elif (action := _ACTIONS.get(key)) is not None:
            action(self)
        self._follow()

    def frame(self) -> Frame:
        window = self.lines[self.top : self.top + self.rows]
        cut = slice(self.left, self.left + self.columns)
        text = "".join(line[cut].ljust(self.columns) for line in window).ljust(self.rows * self.columns)
        cells = np.frombuffer(text.encode("ascii"), np.uint8).reshape(self.rows, self.columns).copy()
        cells[self.line - self.top, self.column - self.left] = CURSOR
        return cells

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def _insert(self, sign: str) -> None:
        line = self.lines[self.line]
        self.lines[self.line] = line[: self.column] + sign + line[self.column :]
        self.column += 1

    def _enter(self) -> None:
        line = self.lines[self.line]
        self.lines[self.line : self.line + 1] = [line[: self.column], line[self.column :]]
        self.line, self.column = self.line + 1, 0

    def _backspace(self) -> None:
        if self.column > 0 or self.line > 0:
            self._left()
            self._delete()

    def _delete(self) -> None:
        line = self.lines[self.line]
        if self.column < len(line):
            self.lines[self.line] = line[: self.column] + line[self.column + 1 :]
        elif self.line + 1 < len(self.lines):
            self.lines[self.line : self.line + 2] = [line + self.lines[self.line + 1]]

    def _left(self) -> None:
        if self.column > 0:
            self.column -= 1
        elif self.line > 0:
            self.line -= 1
            self.column = len(self.lines[self.line])

    def _right(self) -> None:
        if self.column < len(self.lines[self.line]):
            self.column += 1
        elif self.line + 1 < len(self.lines):
            self.line, self.column = self.line + 1, 0

    def _vertical(self, by: int) -> None:
        self.line = min(max(self.line + by, 0), len(self.lines) - 1)
        self.column = min(self.column, len(self.lines[self.line]))

    def _home(self) -> None:
        self.column = 0

    def _end(self) -> None:
        self.column = len(self.lines[self.line])

    def _save(self) -> None:
        self.saved = True

    def _follow(self) -> None:
        """The smallest scroll that shows the cursor."""
        self.top = min(max(self.top, self.line - self.rows + 1), self.line)
        self.left = min(max(self.left, self.column - self.columns + 1), self.column)


_ACTIONS: dict[str, Callable[[Editor], None]] = {
    UP: lambda editor: editor._vertical(-1),
    DOWN: lambda editor: editor._vertical(1),
    RIGHT: Editor._right,
    LEFT: Editor._left,
    PAGE_UP: lambda editor: editor._vertical(-editor.rows),
    PAGE_DOWN: lambda editor: editor._vertical(editor.rows),
    HOME: Editor._home,
    END: Editor._end,
    BACKSPACE: Editor._backspace,
    DELETE: Editor._delete,
    ENTER: Editor._enter,
    SAVE: Editor._save,
}
