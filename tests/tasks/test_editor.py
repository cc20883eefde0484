"""The editor as a state machine: what each key does, what a frame shows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.frames import Editor, TextError, lines_of
from shoal.tasks.editor import (
    BACKSPACE,
    CURSOR,
    DELETE,
    DOWN,
    END,
    ENTER,
    HOME,
    LEFT,
    MOVES,
    PAGE_DOWN,
    RIGHT,
    SAVE,
    UP,
)


def after(text: str, keys: str, rows: int = 3, columns: int = 6) -> Editor:
    editor = Editor(rows, columns, text.split("\n"))
    for key in keys:
        editor.press(key)
    return editor


def shown(editor: Editor) -> list[str]:
    return ["".join("|" if cell == CURSOR else chr(cell) for cell in row) for row in editor.frame()]


@pytest.mark.parametrize(
    ("text", "keys", "result", "place"),
    [
        ("ab", "x", "xab", (0, 1)),
        ("ab", RIGHT + BACKSPACE, "b", (0, 0)),
        ("ab\ncd", DOWN + BACKSPACE, "abcd", (0, 2)),
        ("ab\ncd", END + DELETE, "abcd", (0, 2)),
        ("ab", RIGHT + ENTER, "a\nb", (1, 0)),
        ("ab", BACKSPACE + LEFT + UP, "ab", (0, 0)),
        ("ab", END + DELETE + RIGHT + DOWN, "ab", (0, 2)),
        ("abcd\nx", END + DOWN, "abcd\nx", (1, 1)),
        ("ab\ncd", RIGHT * 3, "ab\ncd", (1, 0)),
        ("ab\ncd", DOWN + LEFT, "ab\ncd", (0, 2)),
        ("a\n" * 9, PAGE_DOWN, "a\n" * 9, (3, 0)),
        ("ab", END + HOME + "z", "zab", (0, 1)),
        ("ab", "\x00\x1b\x15", "ab", (0, 0)),
    ],
)
def test_a_key_does_what_an_editor_does(text: str, keys: str, result: str, place: tuple[int, int]) -> None:
    editor = after(text, keys)
    assert (editor.text, (editor.line, editor.column)) == (result, place)


def test_a_frame_shows_the_window_with_the_cursor() -> None:
    assert shown(after("abc\ndefghijk", RIGHT)) == ["a|c   ", "defghi", "      "]


def test_the_window_follows_the_cursor_with_the_smallest_scroll() -> None:
    editor = after("a\nb\nc\nd\nefghijklm", DOWN * 4 + END)
    assert (editor.top, editor.left) == (2, 4)
    assert shown(editor) == ["      ", "      ", "ijklm|"]
    editor.press(UP)
    assert (editor.top, editor.left) == (2, 1)


def test_saving_is_remembered() -> None:
    assert not after("a", "").saved
    assert after("a", SAVE).saved


@given(
    st.lists(st.sampled_from([*MOVES, "a", " ", ENTER, BACKSPACE, DELETE]), max_size=60),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_the_cursor_is_always_inside_text_and_window(keys: list[str], rows: int, columns: int) -> None:
    editor = Editor(rows, columns, ["one", "", "three long line"])
    for key in keys:
        editor.press(key)
        assert 0 <= editor.line < len(editor.lines)
        assert 0 <= editor.column <= len(editor.lines[editor.line])
        frame = editor.frame()
        assert frame.shape == (rows, columns)
        assert np.count_nonzero(frame == CURSOR) == 1


def test_lines_have_no_tabs_and_no_carriage_returns() -> None:
    assert lines_of("a\tb\r\nc") == ["a   b", "c"]


@pytest.mark.parametrize("sign", ["é", "\x00", "\x1b", "\u200b", "\r", "\x05"])
def test_text_that_frames_cannot_show_is_refused_with_its_line(sign: str) -> None:
    with pytest.raises(TextError, match="Line 2"):
        lines_of(f"fine\nnot {sign} fine")


def test_a_window_without_cells_is_refused() -> None:
    with pytest.raises(TextError):
        Editor(0, 5)
