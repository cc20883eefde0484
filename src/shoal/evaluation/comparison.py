"""Two policies on the same problems: the difference, its interval, and how easily chance would make it.

Paired by problem, so that the difficulty of the problems cancels. The p-value is a sign-flip permutation test: if the policies were
equally good, each problem's difference could as well have had the other sign. Seeded, so the same answers give the same metrics.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.errors import ShoalError
from shoal.evaluation.answers import Answer, by_problem
from shoal.evaluation.metrics import OVERALL, mean_rewards

RESAMPLES = 10_000
EXACT_UP_TO = 13
"""Non-zero differences whose 2ⁿ sign patterns are all tried."""
_ROUNDING = 1e-12


class ComparisonError(ShoalError):
    """Answers that cannot be paired."""

    code = "comparison"
    permanent = True


@dataclass(frozen=True)
class Comparison:
    """`difference` is second − first, in mean task reward."""

    category: str
    problems: int
    first: float
    second: float
    difference: float
    low: float
    high: float
    p_value: float
    better: int
    worse: int


def compare_answers(first: Sequence[Answer], second: Sequence[Answer]) -> list[Comparison]:
    """Overall first, then by category."""
    left, right = by_problem(first), by_problem(second)
    if left.keys() != right.keys():
        only = sorted(left.keys() ^ right.keys())
        raise ComparisonError(
            f"The two policies did not answer the same problems: {only[0]} and {len(only) - 1} more are missing on one side.",
            hint="Evaluate both with the same --tasks and --limit.",
        )
    categories = {name: found[0].category for name, found in left.items()}
    names = sorted(set(categories.values()))
    parts = [(OVERALL, list(left))]
    if len(names) > 1:
        parts += [(name, [problem for problem in left if categories[problem] == name]) for name in names]
    return [
        compare_values(
            mean_rewards([left[problem] for problem in chosen]),
            mean_rewards([right[problem] for problem in chosen]),
            name,
        )
        for name, chosen in parts
    ]


def compare_values(first: Sequence[float], second: Sequence[float], category: str = OVERALL) -> Comparison:
    """From one value per problem and policy, in the same order."""
    differences = np.asarray(second, dtype=float) - np.asarray(first, dtype=float)
    low, high = bootstrap_interval(differences)
    return Comparison(
        category=category,
        problems=len(differences),
        first=float(np.mean(first)),
        second=float(np.mean(second)),
        difference=float(differences.mean()),
        low=low,
        high=high,
        p_value=sign_flip_test(differences),
        better=int((differences > _ROUNDING).sum()),
        worse=int((differences < -_ROUNDING).sum()),
    )


def sign_flip_test(differences: np.ndarray) -> float:
    """Two-sided p-value of the mean difference; exact for few differences, sampled (and never 0) for many."""
    moved = differences[np.abs(differences) > _ROUNDING]
    if not len(moved):
        return 1.0
    observed = abs(moved.sum()) - _ROUNDING
    if len(moved) <= EXACT_UP_TO:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(moved))))
        return float((np.abs(signs @ moved) >= observed).mean())
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(0, RESAMPLES, 1000):  # in parts: thousands of problems stay small in memory
        signs = rng.choice((1.0, -1.0), size=(1000, len(moved)))
        hits += int((np.abs(signs @ moved) >= observed).sum())
    return (hits + 1) / (RESAMPLES + 1)


def bootstrap_interval(differences: np.ndarray) -> tuple[float, float]:
    """Percentiles of the mean over resampled problems."""
    rng = np.random.default_rng(0)
    count = len(differences)
    means = [differences[rng.integers(0, count, count)].mean() for _ in range(RESAMPLES // 5)]
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)
