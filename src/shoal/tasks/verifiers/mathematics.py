"""Math tasks: the boxed or final answer after the think part has to equal the ground truth as mathematics.

Every box has to hold it: an answer that hedges or contradicts itself earns nothing. What equality means is in `math.equality`; it
costs a bounded number of operations, so no answer is slow and every machine comes to the same verdict. Tolerant all the same: two
releases may know different notations.
"""

from typing import Annotated

from pydantic import AliasChoices, BeforeValidator, Field

from shoal.tasks.verifiers.answers import NEVER_CLOSED, answer_part, boxed_answers, statements
from shoal.tasks.verifiers.math.equality import is_equal, is_readable
from shoal.tasks.verifiers.math.expressions import TooCostlyError
from shoal.tasks.verifiers.text import Info, Outcome, compare

LONGEST_ANSWER = 1000
MOST_BOXES = 4
TOO_COSTLY = Outcome(0.0, "the answer is too complicated to compare")


def _text(value: object) -> object:
    """Ground truths come as text or number, some with their box or dollars around them."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return value.strip() if isinstance(value, str) else value


class MathInfo(Info):
    ground_truth: Annotated[
        str,
        Field(min_length=1, max_length=LONGEST_ANSWER, validation_alias=AliasChoices("ground_truth", "answer")),
        BeforeValidator(_text),
    ]


def check_math(info: MathInfo, text: str) -> Outcome:
    answer = answer_part(text)
    if answer is None:
        return Outcome(0.0, NEVER_CLOSED)
    found = boxed_answers(answer) or _stated(answer)
    if not found:
        return Outcome(0.0, "there is no boxed or final answer")
    if len(found) > MOST_BOXES:
        return Outcome(0.0, f"there are {len(found)} different answers")
    if max(map(len, found)) > LONGEST_ANSWER:
        return Outcome(0.0, f"the answer is longer than {LONGEST_ANSWER} letters")
    return _compare((boxed_answers(info.ground_truth) or [info.ground_truth])[-1], found)


def _stated(answer: str) -> list[str]:
    """The last statement, and those before it that are answers rather than sentences."""
    stated = [line for line in statements(answer) if len(line) <= LONGEST_ANSWER]
    return [line for line in stated[:-1] if is_readable(line)] + stated[-1:]


def _compare(expected: str, found: list[str]) -> Outcome:
    for answer in found:
        try:
            same = is_equal(expected, answer)
        except TooCostlyError:
            return TOO_COSTLY
        if not same:
            return compare(answer, expected, False)
    return compare(found[-1], expected, True)
