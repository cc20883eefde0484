"""Metrics are right where they can be known, and their intervals hold what they promise."""

import itertools
import random
from statistics import fmean

import pytest

from shoal.evaluation.metrics import answer_metrics, metrics_by_category, pass_at_k, usual_ks
from shoal.evaluation.statistics import estimate
from support.answers import answer


@pytest.mark.parametrize(("samples", "solved", "k"), [(8, 3, 1), (8, 3, 4), (6, 6, 2), (6, 0, 6), (5, 2, 5)])
def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_answer(samples: int, solved: int, k: int) -> None:
    subsets = list(itertools.combinations([True] * solved + [False] * (samples - solved), k))
    assert pass_at_k(samples, solved, k) == pytest.approx(fmean(any(subset) for subset in subsets))


@pytest.mark.parametrize(("samples", "solved", "k"), [(4, 2, 5), (4, 5, 1), (4, 2, 0)])
def test_pass_at_k_refuses_what_the_answers_cannot_tell(samples: int, solved: int, k: int) -> None:
    with pytest.raises(ValueError, match="cannot be had"):
        pass_at_k(samples, solved, k)


def test_intervals_of_repeated_experiments_hold_the_truth_as_often_as_they_say() -> None:
    rng = random.Random(0)
    held = 0
    for _ in range(600):
        chances = [rng.betavariate(0.6, 1.4) for _ in range(40)]
        values = [fmean(rng.random() < chance for _ in range(4)) for chance in chances]
        found = estimate(values)
        held += found.low <= 0.3 <= found.high
    assert 0.92 <= held / 600 <= 0.98


def test_a_perfect_score_on_few_problems_claims_no_certainty() -> None:
    assert estimate([1.0] * 10).low == pytest.approx(0.72, abs=0.01)
    assert estimate([0.0] * 10).high == pytest.approx(0.28, abs=0.01)
    assert estimate([1.0] * 10).high == pytest.approx(1.0)


def test_more_answers_to_a_problem_are_not_more_problems() -> None:
    few = answer_metrics([answer(f"p{p}", s, float(p % 2)) for p in range(10) for s in range(2)])
    many = answer_metrics([answer(f"p{p}", s, float(p % 2)) for p in range(10) for s in range(50)])
    assert many.avg.low == pytest.approx(few.avg.low)


def test_metrics_of_known_answers() -> None:
    answers = [answer("a", 0, 1.0), answer("a", 1, 0.0), answer("b", 0, 0.0), answer("b", 1, 0.0, finish="length")]
    metrics = answer_metrics(answers)
    assert (metrics.problems, metrics.answers) == (2, 4)
    assert metrics.avg.mean == 0.25
    assert {k: value.mean for k, value in metrics.pass_at.items()} == {1: 0.25, 2: 0.5}
    assert (metrics.mean_tokens, metrics.truncated) == (2.0, 0.25)


def test_categories_stand_below_the_whole() -> None:
    answers = [answer("a", 0, 1.0, category="algebra"), answer("g", 0, 0.0, category="geometry")]
    rows = metrics_by_category(answers)
    assert [(row.category, row.avg.mean) for row in rows] == [("all", 0.5), ("algebra", 1.0), ("geometry", 0.0)]
    assert [row.category for row in metrics_by_category(answers[:1])] == ["all"]


def test_usual_ks_are_powers_of_two_and_the_last() -> None:
    assert usual_ks(1) == [1]
    assert usual_ks(6) == [1, 2, 4, 6]
    assert usual_ks(8) == [1, 2, 4, 8]
