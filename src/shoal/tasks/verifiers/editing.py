"""Editing: the completion is keys; pressed in a text editor that holds one buffer, they have to make it equal to another.

The limit of actions is the run's limit of output tokens, since one token is one action. The verdict is a pure function of the
keys. Buffers that an editor cannot show are refused when the task is loaded.
"""

from typing import Annotated

from pydantic import AfterValidator

from shoal.tasks.editor import Editor, TextError, lines_of
from shoal.tasks.verifiers.answers import NEVER_CLOSED, answer_part
from shoal.tasks.verifiers.text import Info, Outcome

WINDOW = (24, 80)
"""Page keys move by the rows of a window; tasks name the policy's if it has others."""


def _shown(text: str) -> str:
    try:
        return "\n".join(lines_of(text))
    except TextError as error:
        raise ValueError(error.message) from None


Buffer = Annotated[str, AfterValidator(_shown)]


class EditingInfo(Info):
    before: Buffer
    after: Buffer
    rows: int = WINDOW[0]


def check_editing(info: EditingInfo, text: str) -> Outcome:
    """1 if the keys turn `before` into `after`; keys that follow a save count too."""
    keys = answer_part(text)
    if keys is None:
        return Outcome(0.0, NEVER_CLOSED)
    editor = Editor(info.rows, WINDOW[1], info.before.split("\n"))
    for key in keys:
        editor.press(key)
    if editor.text == info.after:
        return Outcome(1.0, "the buffer is as wanted")
    return Outcome(0.0, f"{_lines_off(editor.text, info.after)} lines differ")


def _lines_off(found: str, wanted: str) -> int:
    ours, theirs = found.split("\n"), wanted.split("\n")
    return sum(a != b for a, b in zip(ours, theirs, strict=False)) + abs(len(ours) - len(theirs))
