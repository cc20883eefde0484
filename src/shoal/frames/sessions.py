"""Editor sessions: how somebody changes one text into another, key by key, with habits of their own.

A session is a pure function of (before, after, habits, seed): differences are visited from the top down, the cursor is moved
there, what is wrong is deleted and what is missing is typed. Replaying the keys on `before` gives `after`; that is checked
for every session. Recording it gives one frame per action, the one before the action's first key.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np
from numpy.typing import NDArray

from shoal.frames.actions import ActionTable
from shoal.tasks.editor import (
    BACKSPACE,
    DELETE,
    DOWN,
    END,
    ENTER,
    HOME,
    LEFT,
    PAGE_DOWN,
    RIGHT,
    SAVE,
    UP,
    Editor,
    TextError,
)

NEIGHBOURS = "qwertyuiopasdfghjklzxcvbnm"
"""A typing error hits a letter beside the right one in this row."""


@dataclass(frozen=True)
class Habits:
    """How one person edits; drawn once per session, so that early frames tell about later ones."""

    pages: bool
    """Moves down by pages where it can."""
    jumps: bool
    """Uses home and end."""
    forward_delete: bool
    typo_rate: float

    @classmethod
    def draw(cls, rng: random.Random) -> "Habits":
        return cls(rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.5, rng.choice((0.0, 0.0, 0.01, 0.03)))


@dataclass(frozen=True)
class Recording:
    """The frames and actions of one session, in time."""

    frames_LRC: NDArray[np.uint8]
    actions_L: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.actions_L)


class _Typist:
    """Presses keys on an editor and remembers them."""

    def __init__(self, editor: Editor, habits: Habits, rng: random.Random) -> None:
        self.editor, self.habits, self.rng = editor, habits, rng
        self.keys: list[str] = []

    def press(self, key: str, times: int = 1) -> None:
        for _ in range(times):
            self.editor.press(key)
            self.keys.append(key)

    def go(self, line: int, column: int) -> None:
        while self.editor.line < line:
            far = line - self.editor.line >= self.editor.rows
            self.press(PAGE_DOWN if self.habits.pages and far else DOWN)
        while self.editor.line > line:
            self.press(UP)
        if self.habits.jumps:
            self._jump(column)
        while self.editor.column != column:
            self.press(RIGHT if self.editor.column < column else LEFT)

    def _jump(self, column: int) -> None:
        length = len(self.editor.lines[self.editor.line])
        steps = abs(self.editor.column - column)
        if length - column + 1 < steps:
            self.press(END)
        elif column + 1 < steps:
            self.press(HOME)

    def erase(self, line: int, column: int, end_line: int, end_column: int) -> None:
        """What lies between two places, from either end."""
        count = _distance(self.editor.lines, line, column, end_line, end_column)
        if not count:
            return
        if self.habits.forward_delete:
            self.go(line, column)
            self.press(DELETE, count)
        else:
            self.go(end_line, end_column)
            self.press(BACKSPACE, count)

    def type(self, text: str) -> None:
        for sign in text:
            if sign.lower() in NEIGHBOURS and self.rng.random() < self.habits.typo_rate:
                self.press(NEIGHBOURS[(NEIGHBOURS.index(sign.lower()) + 1) % len(NEIGHBOURS)])
                self.press(BACKSPACE)
            self.press(ENTER if sign == "\n" else sign)


def _distance(lines: list[str], line: int, column: int, end_line: int, end_column: int) -> int:
    if line == end_line:
        return end_column - column
    between = sum(len(row) + 1 for row in lines[line + 1 : end_line])
    return len(lines[line]) - column + 1 + between + end_column


def session_keys(before: list[str], after: list[str], rows: int, columns: int, seed: int) -> str:
    """The keys that turn `before` into `after`, the last one saves."""
    rng = random.Random(seed)
    editor = Editor(rows, columns, list(before))
    typist = _Typist(editor, Habits.draw(rng), rng)
    for start, end, lines in differences(before, after):
        shift = len(editor.lines) - len(before)
        _replace(typist, start + shift, end + shift, lines)
    typist.press(SAVE)
    if editor.lines != after:
        raise TextError("A session does not lead to its goal; this is a bug of the session's rules.")
    return "".join(typist.keys)


def repair_keys(before: list[str], after: list[str], rows: int, columns: int) -> str:
    """The keys of an orderly editor that changes as few characters of each line as it can; both texts have as many lines."""
    editor = Editor(rows, columns, list(before))
    typist = _Typist(editor, Habits(pages=False, jumps=False, forward_delete=True, typo_rate=0.0), random.Random(0))
    for line, (old, new) in enumerate(zip(before, after, strict=True)):
        for tag, first, end, start, stop in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            if tag != "equal":
                column = start  # what lies before it is already as wanted
                typist.go(line, column)
                typist.press(DELETE, end - first)
                typist.type(new[start:stop])
    typist.press(SAVE)
    if editor.lines != after:
        raise TextError("A session does not lead to its goal; this is a bug of the session's rules.")
    return "".join(typist.keys)


def differences(before: list[str], after: list[str]) -> Iterator[tuple[int, int, list[str]]]:
    """(first, end) of changed lines in `before`, and the lines that replace them."""
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    for tag, first, end, start, stop in matcher.get_opcodes():
        if tag == "replace" and end - first == stop - start:
            for offset in range(end - first):  # line by line, as one edits
                yield first + offset, first + offset + 1, after[start + offset : start + offset + 1]
        elif tag != "equal":
            yield first, end, after[start:stop]


def _replace(typist: _Typist, first: int, end: int, lines: list[str]) -> None:
    rows = typist.editor.lines
    if first == end:
        _insert_lines(typist, first, lines)
    elif not lines:
        _erase_lines(typist, first, end)
    else:
        old, new = "\n".join(rows[first:end]), "\n".join(lines)
        head = _common(old, new)
        tail = _common(old[head:][::-1], new[head:][::-1])
        begin, stop = _place(old, head), _place(old, len(old) - tail)
        typist.erase(first + begin[0], begin[1], first + stop[0], stop[1])
        typist.go(first + begin[0], begin[1])
        typist.type(new[head : len(new) - tail])


def _insert_lines(typist: _Typist, first: int, lines: list[str]) -> None:
    rows = typist.editor.lines
    if first < len(rows):
        typist.go(first, 0)
        typist.type("\n".join(lines) + "\n")
    else:
        typist.go(first - 1, len(rows[first - 1]))
        typist.type("\n" + "\n".join(lines))


def _erase_lines(typist: _Typist, first: int, end: int) -> None:
    rows = typist.editor.lines
    if end < len(rows):
        typist.erase(first, 0, end, 0)
    elif first > 0:
        typist.erase(first - 1, len(rows[first - 1]), end - 1, len(rows[end - 1]))
    else:
        typist.erase(0, 0, end - 1, len(rows[end - 1]))


def _place(text: str, offset: int) -> tuple[int, int]:
    before = text[:offset]
    return before.count("\n"), offset - (before.rfind("\n") + 1)


def _common(first: str, second: str) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def record(before: list[str], keys: str, table: ActionTable, rows: int, columns: int, limit: int) -> Recording:
    """The first `limit` actions of a session with the frame before each."""
    editor = Editor(rows, columns, list(before))
    actions = table.encode(keys)[:limit]
    frames = np.empty((len(actions), rows, columns), np.uint8)
    for at, action in enumerate(actions):
        frames[at] = editor.frame()
        for key in table.entries[action]:
            editor.press(key)
    return Recording(frames, np.array(actions, np.int64))
