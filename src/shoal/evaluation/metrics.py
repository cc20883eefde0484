"""Metrics of a set of answers: avg@k, unbiased pass@k and their 95 % intervals, overall and by category. Pure.

The problems are the sample, not the answers: answers to one problem are alike, so intervals come from the spread between problems.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance, stdev

from shoal.evaluation.answers import Answer, by_problem

Z_95 = 1.959964
OVERALL = "all"
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Student's t for a 95 % interval by degrees of freedom."""


@dataclass(frozen=True)
class Estimate:
    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class AnswerMetrics:
    """`pass_at[j]` is the chance that at least one of j answers is right."""

    category: str
    problems: int
    answers: int
    avg: Estimate
    pass_at: dict[int, Estimate]
    mean_tokens: float
    truncated: float
    """Share of answers that hit the token limit."""


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """1 − C(n−c, k)/C(n, k): the unbiased estimate from n ≥ k answers of which c are right (arXiv 2107.03374)."""
    if not 1 <= k <= samples or not 0 <= solved <= samples:
        raise ValueError(f"pass@{k} cannot be had from {solved} right of {samples} answers")
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of per-problem values in 0 … 1 with a Wilson interval.

    The number of problems is replaced by the number of coin tosses that would spread as much, so that fractions are treated
    right and a perfect score on ten problems does not claim certainty.
    """
    count, mean = len(values), fmean(values)
    spread = pvariance(values) * count / max(1, count - 1)
    tosses = count if spread == 0 else max(float(count), count * mean * (1 - mean) / spread)
    centre = (mean + Z_95**2 / (2 * tosses)) / (1 + Z_95**2 / tosses)
    half = Z_95 / (1 + Z_95**2 / tosses) * math.sqrt(mean * (1 - mean) / tosses + Z_95**2 / (4 * tosses**2))
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half))


def mean_error(values: Sequence[float]) -> float:
    """Half width of the 95 % interval of the mean of independent runs; 0 for a single one."""
    freedom = len(values) - 1
    if freedom < 1:
        return 0.0
    many = Z_95 + (Z_95**3 + Z_95) / (4 * freedom) + (5 * Z_95**5 + 16 * Z_95**3 + 3 * Z_95) / (96 * freedom**2)
    return T_95.get(freedom, many) * stdev(values) / math.sqrt(len(values))


def usual_ks(samples: int) -> list[int]:
    """1, 2, 4 … up to k, and k itself."""
    return sorted({1 << power for power in range(samples.bit_length()) if 1 << power <= samples} | {samples})


def answer_metrics(
    answers: Iterable[Answer], category: str = OVERALL, ks: Sequence[int] | None = None
) -> AnswerMetrics:
    problems = list(by_problem(answers).values())
    if not problems:
        raise ValueError("no answers, no metrics")
    rows = [answer for found in problems for answer in found]
    solved = [(len(found), sum(answer.solved for answer in found)) for found in problems]
    chosen = usual_ks(min(count for count, _ in solved)) if ks is None else ks
    return AnswerMetrics(
        category=category,
        problems=len(problems),
        answers=len(rows),
        avg=estimate(mean_rewards(problems)),
        pass_at={k: estimate([pass_at_k(count, right, k) for count, right in solved]) for k in chosen},
        mean_tokens=fmean(len(answer.output_tokens) for answer in rows),
        truncated=fmean(answer.finish_reason == "length" for answer in rows),
    )


def mean_rewards(problems: Iterable[Sequence[Answer]]) -> list[float]:
    """One value per problem; clamped, because an interval for a share needs shares."""
    return [min(1.0, max(0.0, fmean(answer.reward for answer in found))) for found in problems]


def metrics_by_category(answers: Sequence[Answer], ks: Sequence[int] | None = None) -> list[AnswerMetrics]:
    """Overall first, then each category by name; a single category is not repeated."""
    overall = answer_metrics(answers, ks=ks)
    names = sorted({answer.category for answer in answers})
    if len(names) < 2:
        return [overall]
    ks = list(overall.pass_at)
    parts = [[answer for answer in answers if answer.category == name] for name in names]
    return [overall, *(answer_metrics(part, name, ks) for name, part in zip(names, parts, strict=True))]
