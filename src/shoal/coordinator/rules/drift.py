"""The sequential test of a worker over its audited tokens: small deviations add up, honest rounding does not.

Each audit brings the log-likelihood ratio of "numerics coarser than honest" against "honest" for the rounding flips of the
submission. Page's rule (CUSUM) sums them and never falls below zero, so past good behaviour cannot be saved up. An honest key
crosses the limit, on average, not before 1 / error audits (Lorden's bound), whatever it did before.
"""

import math
from typing import Literal

FALSE_BANS = 1e-6
"""Per audited submission of an honest worker."""
FALSE_SUSPICIONS = 1e-3

BAN_AT = -math.log(FALSE_BANS)
SUSPECT_AT = -math.log(FALSE_SUSPICIONS)

DriftLevel = Literal["honest", "suspicious", "cheating"]


def after(drift: float, evidence: float) -> float:
    """The worker's sum after one more audit."""
    return max(0.0, drift + evidence)


def level(drift: float) -> DriftLevel:
    if drift >= BAN_AT:
        return "cheating"
    return "suspicious" if drift >= SUSPECT_AT else "honest"


def became_suspicious(before: float, now: float) -> bool:
    return level(before) == "honest" and level(now) == "suspicious"
