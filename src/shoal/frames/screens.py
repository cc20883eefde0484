"""What a policy of frames sees: the buffer in the upper half of a screen, the one that it should become in the lower half.

A screen is a pure function of prompt tokens and actions: the prompt says both buffers, every token after it presses the keys of
its entry. The two halves scroll together. The cell under the cursor, and in the lower half every cell that differs from the one
above, is shown in reverse (code point + 128), so that its character stays readable. Any sequence of tokens has a screen: what
cannot be shown in a prompt is left out, and a token that is not a key of the editor changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shoal.tasks.editor import BLANK, CODE_POINTS, Editor, Frame, is_printable

GOAL, GO = "<|goal|>", "<|go|>"
"""Between the two buffers of a prompt, and at its end."""
NOTHING = "\0"
"""A key that no editor knows. Its token is 0, which also pads: so padding costs no frames."""
REVERSED = CODE_POINTS
SCREEN_CODE_POINTS = 2 * CODE_POINTS


@dataclass
class Screen:
    editor: Editor
    goal: list[str]

    def copy(self) -> "Screen":
        """Another one to press keys on; the goal never changes."""
        return Screen(replace(self.editor, lines=list(self.editor.lines)), self.goal)

    def press(self, keys: str) -> None:
        for key in keys:
            self.editor.press(key)

    def frame(self) -> Frame:
        editor = self.editor
        upper, lower = _window(editor.lines, editor), _window(self.goal, editor)
        lower[lower != upper] += REVERSED
        upper[editor.line - editor.top, editor.column - editor.left] += REVERSED
        return np.concatenate([upper, lower])


def _window(lines: list[str], editor: Editor) -> Frame:
    cut = slice(editor.left, editor.left + editor.columns)
    rows = [line[cut].ljust(editor.columns) for line in lines[editor.top : editor.top + editor.rows]]
    text = "".join(rows).encode("ascii")
    cells = np.full(editor.rows * editor.columns, BLANK, np.uint8)
    cells[: len(text)] = np.frombuffer(text, np.uint8)
    return cells.reshape(editor.rows, editor.columns)


@dataclass(frozen=True)
class Renderer:
    """Tokens to screens. `entries` are the keys of every token, the two marks included."""

    entries: tuple[str, ...]
    rows: int
    columns: int

    @cached_property
    def go(self) -> int:
        return self.entries.index(GO)

    def start(self, prompt: Sequence[int]) -> Screen:
        """The screen after a prompt: `prompt` ends before the mark, or is empty."""
        text = "".join(self.entries[token] for token in prompt)
        before, _, goal = text.partition(GOAL)
        return Screen(Editor(self.rows // 2, self.columns, _lines(before)), _lines(goal))

    def frames(self, screen: Screen, actions: Sequence[int]) -> list[Frame]:
        """One frame after each action, which the screen has then seen."""
        shown: list[Frame] = []
        for action in actions:
            keys = self.entries[action]
            screen.press(keys)
            shown.append(shown[-1] if keys == NOTHING and shown else screen.frame())
        return shown

    def read(self, tokens: Sequence[int]) -> tuple[int, list[Frame]]:
        """Where the first frame stands, the place of the mark, and one frame for it and for each token after it."""
        if self.go not in tokens:
            return len(tokens), []
        first = list(tokens).index(self.go)
        screen = self.start(tokens[:first])
        return first, [screen.frame(), *self.frames(screen, tokens[first + 1 :])]


def _lines(text: str) -> list[str]:
    return ["".join(filter(is_printable, line)) for line in text.split("\n")]
