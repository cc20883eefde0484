"""The sequential test of a worker over its audited tokens: small deviations add up, honest rounding does not.

Each audit brings log-likelihood ratios of several alternatives (coarser numerics, other temperatures) against honest work. Page's
rule (CUSUM) sums each of them and never lets a sum fall below zero, so past good behaviour cannot be saved up. The mean of the
likelihood ratios decides: an honest key crosses the limit, on average, not before 1 / error audits, whatever it did before and
however many alternatives there are (the mean of e-detectors is one; Shin, Ramdas and Rinaldo 2023).
"""

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal

FALSE_BANS = 1e-6
"""Per audited submission of an honest worker."""
FALSE_SUSPICIONS = 1e-3

BAN_AT = -math.log(FALSE_BANS)
SUSPECT_AT = -math.log(FALSE_SUSPICIONS)

DriftLevel = Literal["honest", "suspicious", "cheating"]
Sums = tuple[float, ...]
"""One per alternative, in the order of the validators; none before the first audit."""


def after(sums: Sums, evidence: Sequence[float]) -> Sums:
    """The worker's sums after one more audit."""
    pairs = zip_longest(sums, evidence, fillvalue=0.0)
    return tuple(max(0.0, known + new) for known, new in pairs)


def total(sums: Sums) -> float:
    """Logarithm of the mean likelihood ratio."""
    if not sums:
        return 0.0
    largest = max(sums)
    return largest + math.log(sum(math.exp(one - largest) for one in sums) / len(sums))


def level(drift: float) -> DriftLevel:
    """Of a total."""
    if drift >= BAN_AT:
        return "cheating"
    return "suspicious" if drift >= SUSPECT_AT else "honest"


def became_suspicious(before: float, now: float) -> bool:
    return level(before) == "honest" and level(now) == "suspicious"
