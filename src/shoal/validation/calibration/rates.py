"""Exact bounds on rates from counts: what honest arithmetic may do, and how sure a measured error rate is.

Binomial intervals are those of Clopper and Pearson, Poisson bounds those of Garwood; both hold for every count, zero included,
where they become the rule of three. Solved by bisection on the exact sums, so that no statistics package is needed.
"""

import math
from collections.abc import Callable

BISECTIONS = 100


def binomial_interval(hits: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Where the true rate lies, two-sided; each side errs with at most half of 1 − confidence."""
    if not 0 <= hits <= trials or trials < 1:
        raise ValueError(f"{hits} of {trials} is no rate")
    tail = (1 - confidence) / 2
    low = 0.0 if hits == 0 else _falling_root(lambda rate: _binomial_cdf(hits - 1, trials, rate), 1 - tail, 1.0)
    high = 1.0 if hits == trials else _falling_root(lambda rate: _binomial_cdf(hits, trials, rate), tail, 1.0)
    return low, high


def binomial_upper(hits: int, trials: int, confidence: float = 0.95) -> float:
    """One-sided: the true rate is below this."""
    return binomial_interval(hits, trials, 2 * confidence - 1)[1]


def poisson_upper(count: int, confidence: float = 0.95) -> float:
    """The expected count is below this, one-sided."""
    return _falling_root(lambda mean: poisson_cdf(count, mean), 1 - confidence, 10.0 * (count + 10))


def poisson_allowance(mean: float, error: float) -> int:
    """The smallest count that a Poisson variable of this mean exceeds with a probability of at most `error`."""
    count = int(mean)
    while 1 - poisson_cdf(count, mean) > error:
        count += 1
    return count


def poisson_cdf(count: int, mean: float) -> float:
    if mean <= 0:
        return 1.0
    return math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1))


def _binomial_cdf(hits: int, trials: int, rate: float) -> float:
    if rate <= 0 or hits >= trials:
        return 1.0
    if rate >= 1:
        return 0.0
    whole = math.lgamma(trials + 1)
    logs = (
        whole - math.lgamma(k + 1) - math.lgamma(trials - k + 1) + k * math.log(rate) + (trials - k) * math.log1p(-rate)
        for k in range(hits + 1)
    )
    return math.fsum(map(math.exp, logs))


def _falling_root(function: Callable[[float], float], value: float, high: float) -> float:
    """Where a falling function of [0, high] takes the value."""
    low = 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > value else (low, middle)
    return (low + high) / 2
