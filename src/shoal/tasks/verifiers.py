"""Verifiers: from a task and a completion to a reward, each a pure function registered under its task type.

Each verifier is declared exact or tolerant. Exact means that every honest machine computes the same reward from the same
text, so that a differing claim proves cheating. The completion text starts inside the think part that the prompt opened.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.tasks.model import Task

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
_INTEGER = re.compile(r"[+-]?[0-9]{1,32}")


@dataclass(frozen=True)
class Score:
    reward: float
    why: str
    exact: bool
    """A claim that differs from this reward proves cheating."""


@dataclass(frozen=True)
class Verifier:
    check: Callable[[Task, str], tuple[float, str]]
    exact: bool


def check_integer_answer(task: Task, completion_text: str) -> tuple[float, str]:
    """1 if the text after the only closing think tag is the integer `verification_info["answer"]` and nothing else."""
    _, tag, answer = completion_text.partition(THINK_CLOSE)
    if not tag:
        return 0.0, "the thinking was never closed"
    found = answer.strip()
    if not _INTEGER.fullmatch(found):
        return 0.0, "the answer is not an integer"
    expected = int(task.verification_info["answer"])
    if int(found) != expected:
        return 0.0, f"answered {int(found)}, expected {expected}"
    return 1.0, "the answer is right"


VERIFIERS: dict[str, Verifier] = {
    "integer_answer": Verifier(check_integer_answer, exact=True),
}


def score(task: Task, completion_text: str) -> Score:
    verifier = _verifier(task.task_type)
    reward, why = verifier.check(task, completion_text)
    return Score(reward=reward, why=why, exact=verifier.exact)


def is_exact(task_type: str) -> bool:
    return _verifier(task_type).exact


def _verifier(task_type: str) -> Verifier:
    try:
        return VERIFIERS[task_type]
    except KeyError:
        known = ", ".join(sorted(VERIFIERS))
        raise ConfigError(f"There is no verifier for task type {task_type!r}.", hint=f"Known: {known}.") from None
