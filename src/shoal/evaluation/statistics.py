"""Intervals of rates and means, for metrics of answers and for limits of an audit. Pure.

Binomial intervals are those of Clopper and Pearson, Poisson bounds those of Garwood; both hold for every count, zero included,
where they become the rule of three. They are solved by bisection on the exact sums, so that no statistics package is needed.
Means of shares have Wilson intervals, means of independent runs those of Student's t.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance, stdev

BISECTIONS = 100
Z_95 = 1.959964
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Student's t for a 95 % interval by degrees of freedom."""


@dataclass(frozen=True)
class Estimate:
    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of per-problem values in 0 … 1 with a Wilson interval.

    The number of problems is replaced by the number of coin tosses with the same spread, so that fractions are treated
    correctly and a perfect score on ten problems does not claim certainty.
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
