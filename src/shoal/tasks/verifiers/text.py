"""Verifiers whose verdict is a pure function of the text: integers, exact matches, choices, formats, JSON.

All are exact. Each comes with the shape of its `verification_info`; what does not have that shape is refused when the task is
loaded, so a check never meets it.
"""

import json
import re
from typing import Annotated, Any, NamedTuple

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StrictInt, field_validator

from shoal.tasks.verifiers.answers import NEVER_CLOSED, answer_part, boxed_answers, final_answer, last_code_block

_INTEGER = re.compile(r"[+-]?[0-9]{1,32}")
_NUMBER = re.compile(r"(?<![0-9.])-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
_CHOICE = re.compile(r"\(?([A-Za-z])\)?[.:)]?")
_OTHER_CHOICE = re.compile(r"\b(?:or|and)\s+\(?[A-Z]\b|\([A-J]\)|(?<![A-Za-z])[A-J]\)")
_SHOWN = 80
LEFT_TO_MODEL = "left to the reward model of the validator"


class Outcome(NamedTuple):
    reward: float
    why: str
    limited: bool = False
    """A limit of time or memory decided, so another machine may see it otherwise."""
    cost_s: float = 0.0
    """Seconds of processor time that other processes spent on it."""


class Info(BaseModel):
    """Shape of one verifier's `verification_info`; what it does not name is left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore")


def shown(value: object) -> str:
    """A value as a reason may quote it."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def compare(found: str, expected: str, same: bool) -> Outcome:
    if same:
        return Outcome(1.0, "the answer is right")
    return Outcome(0.0, f"answered {shown(found)}, expected {shown(expected)}")


def check_by_environment(_info: Info, _text: str) -> Outcome:
    """A single text is no episode: its environment decides."""
    return Outcome(0.0, "left to the environment of the task")


class IntegerInfo(Info):
    answer: StrictInt


def check_integer(info: IntegerInfo, text: str) -> Outcome:
    """1 if the text after the only closing think tag is the integer and nothing else."""
    answer = answer_part(text)
    if answer is None:
        return Outcome(0.0, NEVER_CLOSED)
    found = answer.strip()
    if not _INTEGER.fullmatch(found):
        return Outcome(0.0, "the answer is not an integer")
    return compare(str(int(found)), str(info.answer), int(found) == info.answer)


def check_last_number(info: IntegerInfo, text: str) -> Outcome:
    """1 if the last number of the answer is the integer, whatever is said around it."""
    answer = answer_part(text)
    if answer is None:
        return Outcome(0.0, NEVER_CLOSED)
    numbers = _NUMBER.findall(answer)
    if not numbers:
        return Outcome(0.0, "there is no number in the answer")
    found = str(numbers[-1])
    whole, _, decimals = found.replace(",", "").partition(".")
    # Compared as text: a number of a million digits costs nothing.
    same = not decimals.strip("0") and (whole.lstrip("-").lstrip("0") or "0") == str(abs(info.answer))
    return compare(found, str(info.answer), same and (info.answer == 0 or (info.answer < 0) == whole.startswith("-")))


class ExactInfo(Info):
    answer: Annotated[str, Field(validation_alias=AliasChoices("answer", "ground_truth"))]
    ignore_case: bool = False


def check_exact(info: ExactInfo, text: str) -> Outcome:
    """1 if the boxed or final answer, or else the whole answer part, is the expected text up to outer white space."""
    answer = answer_part(text)
    if answer is None:
        return Outcome(0.0, NEVER_CLOSED)
    boxes = boxed_answers(answer)
    found, expected = (boxes[0] if len(boxes) == 1 else answer).strip(), info.answer.strip()
    candidates = {found, final_answer(answer) or found}
    fold = str.casefold if info.ignore_case else str
    return compare(found, expected, fold(expected) in {fold(candidate) for candidate in candidates})


class ChoiceInfo(Info):
    answer: Annotated[str, Field(pattern=r"^[A-Za-z]$", validation_alias=AliasChoices("answer", "ground_truth"))]


def check_choice(info: ChoiceInfo, text: str) -> Outcome:
    """1 if the chosen letter is the right one; it is in a box, behind "answer is", or alone."""
    answer = answer_part(text)
    if answer is None:
        return Outcome(0.0, NEVER_CLOSED)
    found = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", final_answer(answer) or answer)
    choice = _CHOICE.fullmatch(found.strip().strip("*$").strip()) or re.match(r"\(?([A-Z])[.:)]", found.strip())
    if choice is None:
        return Outcome(0.0, "no letter was chosen")
    if _OTHER_CHOICE.search(found.strip(), choice.end()):
        return Outcome(0.0, "several letters were chosen")
    letter = choice.group(1).upper()
    return compare(letter, info.answer.upper(), letter == info.answer.upper())


def check_learned(info: Info, text: str) -> Outcome:
    """0 for everybody: only the validator holds the reward model, and puts its ranking in place of this."""
    return Outcome(0.0, LEFT_TO_MODEL)


class FormatInfo(Info):
    tags: tuple[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")], ...] = ()


def check_format(info: FormatInfo, text: str) -> Outcome:
    """1 if the thinking is closed once, an answer follows, and it holds each tag's pair exactly once, in this order."""
    answer = answer_part(text)
    if answer is None:
        return Outcome(0.0, NEVER_CLOSED)
    if answer_part(answer) is not None:
        return Outcome(0.0, "the thinking was closed twice")
    if not answer.strip():
        return Outcome(0.0, "nothing follows the thinking")
    position = 0
    for tag in info.tags:
        for mark in (f"<{tag}>", f"</{tag}>"):
            if answer.count(mark) != 1:
                return Outcome(0.0, f"{mark} occurs {answer.count(mark)} times")
            place = answer.find(mark)
            if place < position:
                return Outcome(0.0, f"{mark} is out of order")
            position = place + len(mark)
    return Outcome(1.0, "the format is right")


class JsonInfo(Info):
    output: Any

    @field_validator("output", mode="before")
    @classmethod
    def _parsed(cls, value: object) -> object:
        """Datasets often keep the expected value as the text of a JSON value."""
        if isinstance(value, str):
            try:
                return json.loads(value)
            except ValueError:
                return value
        return value


def check_json(info: JsonInfo, text: str) -> Outcome:
    """1 if the last JSON value of the answer, or its field `output`, is the expected one."""
    answer = answer_part(text)
    if answer is None:
        return Outcome(0.0, NEVER_CLOSED)
    block = last_code_block(answer, ("json", "")) or answer
    try:
        found = json.loads(block[_json_start(block) :].strip())
    except (ValueError, RecursionError):
        return Outcome(0.0, "the answer is not JSON")
    if isinstance(found, dict) and "output" in found and not same_json(found, info.output):
        found = found["output"]
    return compare(shown(found), shown(info.output), same_json(found, info.output))


def _json_start(text: str) -> int:
    """Prose may come first: a JSON object begins at the first brace, any other value at the beginning."""
    return max(0, text.find("{"))


def same_json(one: object, other: object) -> bool:
    """Equal as JSON: 1 and 1.0 are, true and 1 are not."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return one == other
