"""Which tasks teach something: a task whose solve rate lies in a band, neither out of reach nor already known.

A group of equal rewards has no advantage, so a task that the policy always or never solves costs samples and gives nothing. Pure.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.evaluation.answers import Answer

TOO_HARD, TOO_EASY = "too hard", "too easy"
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Band:
    """Both ends belong to it; 12.5–50 % of 8 samples is 1 to 4 solved."""

    low: float = 0.125
    high: float = 0.5

    def refusal(self, solve_rate: float) -> str:
        """Why a task is not kept; empty if it is."""
        if solve_rate < self.low - _ROUNDING:
            return TOO_HARD
        return TOO_EASY if solve_rate > self.high + _ROUNDING else ""


def solve_rates(answers: Iterable[Answer]) -> dict[str, float]:
    """Share of solved answers, by problem, in the order of their first answers; holds no answer."""
    given: Counter[str] = Counter()
    solved: Counter[str] = Counter()
    for answer in answers:
        given[answer.problem_id] += 1
        solved[answer.problem_id] += answer.solved
    return {name: solved[name] / count for name, count in given.items()}


def histogram(rates: Iterable[float], samples: int) -> dict[str, int]:
    """How many tasks were solved 0, 1 … k times of k."""
    counts = {f"{solved}/{samples}": 0 for solved in range(samples + 1)}
    for rate in rates:
        counts[f"{round(rate * samples)}/{samples}"] += 1
    return counts
