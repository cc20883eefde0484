"""The bounds are exact: they match published tables and mean what they say."""

import pytest

from shoal.validation.calibration.rates import (
    binomial_interval,
    binomial_upper,
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
