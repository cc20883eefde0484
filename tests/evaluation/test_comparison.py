"""The paired test knows a difference from luck."""

import random

import numpy as np
import pytest

from shoal.evaluation import ComparisonError, compare_answers
from shoal.evaluation.comparison import EXACT_UP_TO, compare_values, sign_flip_test
from support.answers import answer


def test_the_exact_test_counts_sign_patterns() -> None:
    assert sign_flip_test(np.array([1.0, 1.0, 1.0])) == pytest.approx(2 / 8)
    assert sign_flip_test(np.array([1.0, 1.0, 1.0, 0.0])) == pytest.approx(2 / 8)
    assert sign_flip_test(np.zeros(5)) == 1.0


def test_exact_and_sampled_test_agree() -> None:
    rng = np.random.default_rng(1)
    moved = rng.normal(0.3, 1.0, EXACT_UP_TO)
    padded = np.concatenate([moved, [1e-9]])
    assert sign_flip_test(padded) == pytest.approx(sign_flip_test(moved), abs=0.02)


def test_equal_policies_are_called_different_as_often_as_the_level_says() -> None:
    rng = np.random.default_rng(0)
    alarms = [sign_flip_test(rng.normal(0, 1, 12)) < 0.05 for _ in range(400)]
    assert 0.02 <= np.mean(alarms) <= 0.08


def test_a_real_difference_is_found_with_its_size() -> None:
    rng = random.Random(0)
    first = [rng.random() * 0.5 for _ in range(60)]
    result = compare_values(first, [value + 0.2 for value in first])
    assert result.difference == pytest.approx(0.2)
    assert result.low - 1e-9 <= 0.2 <= result.high + 1e-9
    assert result.p_value < 0.001
    assert (result.better, result.worse) == (60, 0)


def test_answers_are_paired_by_problem_whatever_their_order() -> None:
    left = [answer("a", 0, 0.0), answer("b", 0, 1.0)]
    right = [answer("b", 0, 1.0), answer("a", 0, 1.0)]
    whole = compare_answers(left, right)[0]
    assert (whole.first, whole.second, whole.better, whole.worse) == (0.5, 1.0, 1, 0)


def test_categories_are_compared_too() -> None:
    left = [answer("a", 0, 0.0, category="x"), answer("b", 0, 1.0, category="y")]
    right = [answer("a", 0, 1.0, category="x"), answer("b", 0, 1.0, category="y")]
    assert [(row.category, row.difference) for row in compare_answers(left, right)] == [
        ("all", 0.5),
        ("x", 1.0),
        ("y", 0.0),
    ]


def test_other_problems_are_refused_by_name() -> None:
    with pytest.raises(ComparisonError, match="b and 0 more"):
        compare_answers([answer("a", 0, 0.0), answer("b", 0, 0.0)], [answer("a", 0, 0.0)])
