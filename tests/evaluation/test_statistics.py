"""The bounds are exact: they match published tables and mean what they say."""

import pytest

from shoal.evaluation.statistics import (
    binomial_interval,
    binomial_upper,
    mean_error,
    poisson_allowance,
    poisson_cdf,
    poisson_upper,
)


def test_no_hit_gives_the_rule_of_three() -> None:
    assert binomial_upper(0, 1000) == pytest.approx(3 / 1000, rel=0.01)
    assert poisson_upper(0) == pytest.approx(2.9957, abs=1e-4)


def test_intervals_match_the_tables() -> None:
    assert binomial_interval(1, 10) == pytest.approx((0.002529, 0.445016), abs=1e-6)
    assert binomial_interval(5, 10) == pytest.approx((0.187086, 0.812914), abs=1e-6)
    assert poisson_upper(3) == pytest.approx(7.7537, abs=1e-4)


def test_certain_counts_reach_the_ends() -> None:
    assert binomial_interval(0, 5)[0] == 0.0
    assert binomial_interval(5, 5)[1] == 1.0


@pytest.mark.parametrize(("hits", "trials"), [(-1, 5), (6, 5), (0, 0)])
def test_what_is_no_rate_is_refused(hits: int, trials: int) -> None:
    with pytest.raises(ValueError, match="is no rate"):
        binomial_interval(hits, trials)


@pytest.mark.parametrize("mean", [0.0, 0.06, 2.5, 40.0])
def test_an_allowance_is_exceeded_as_rarely_as_asked_and_not_more_rarely(mean: float) -> None:
    count = poisson_allowance(mean, 1e-6)
    assert 1 - poisson_cdf(count, mean) <= 1e-6
    assert count <= mean or 1 - poisson_cdf(count - 1, mean) > 1e-6


def test_the_error_over_seeds_is_students() -> None:
    assert mean_error([0.4]) == 0.0
    assert mean_error([0.0, 1.0]) == pytest.approx(12.706 * 0.5, rel=1e-3)
    # 12 values 0 … 11: s = 3.6056, t(11) = 2.201
    assert mean_error(list(range(12))) == pytest.approx(2.201 * 3.6056 / 12**0.5, rel=1e-3)
