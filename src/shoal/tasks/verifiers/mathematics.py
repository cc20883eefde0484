"""Math tasks: the last boxed or final answer after the think part has to equal the ground truth as mathematics.

Equal texts and equal numbers are decided here. Everything else goes to math-verify in a process of its own, which is killed when it
takes too long: a tower of powers earns 0 and does not delay others. Tolerant: other releases of sympy may see other equalities.
"""

import re
from fractions import Fraction
from typing import Annotated

from pydantic import AliasChoices, BeforeValidator, Field

from shoal.tasks.verifiers.answers import NEVER_CLOSED, answer_part, final_answer, last_boxed
from shoal.tasks.verifiers.scorer_pool import OVER_LIMIT, shared_scorers
from shoal.tasks.verifiers.text import Info, Outcome, compare

LONGEST_ANSWER = 1000
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,100}(?:\.[0-9]{1,100})?|\.[0-9]{1,100})")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:,|\{,\}|\\,|\\!)(?=[0-9]{3}(?![0-9]))")


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
    found = final_answer(answer)
    if not found:
        return Outcome(0.0, "there is no boxed or final answer")
    if len(found) > LONGEST_ANSWER:
        return Outcome(0.0, f"the answer is longer than {LONGEST_ANSWER} letters")
    expected = last_boxed(info.ground_truth) or info.ground_truth
    decided = decide(tidy(expected), tidy(found))
    if decided is not None:
        return compare(found, expected, decided)
    return _compare(expected, found)


def _compare(expected: str, found: str) -> Outcome:
    same = shared_scorers("math").ask(_bare(expected), _bare(found))
    return OVER_LIMIT if same is None else compare(found, expected, same == 1.0)


def decide(expected: str, found: str) -> bool | None:
    """What needs no algebra: equal texts, and two plain numbers."""
    if expected == found:
        return True
    if _NUMBER.fullmatch(expected) and _NUMBER.fullmatch(found):
        return Fraction(expected) == Fraction(found)
    return None


def tidy(text: str) -> str:
    """Without what does not change the mathematics: dollars, spaces, separators of thousands, \\left and \\right."""
    bare = _THOUSANDS.sub("", _bare(text))
    for ornament in ("\\left", "\\right", "\\displaystyle", "\\!", "\\,", "\\;", "\\ "):
        bare = bare.replace(ornament, "")
    return "".join(bare.split()).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


def _bare(text: str) -> str:
    text = text.strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)].strip()
    return text.rstrip(".").strip()
