"""Metrics of a set of answers: avg@k, unbiased pass@k and their 95 % intervals, overall and by category. Pure.

The problems are the sample, not the answers: answers to one problem are alike, so intervals come from the spread between problems.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from shoal.evaluation.answers import Answer, by_problem
from shoal.evaluation.statistics import Estimate, estimate
from shoal.protocol.rollouts import TRUNCATED
from shoal.protocol.segments import sampled_count

OVERALL = "all"


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
        mean_tokens=fmean(sampled_count(answer.segment_lengths) for answer in rows),
        truncated=fmean(answer.finish_reason in TRUNCATED for answer in rows),
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
