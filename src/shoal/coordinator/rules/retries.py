"""When a submission that could not be verified is tried again, and when it is quarantined: pure rules without a penalty.

A fault over the file itself counts as a try; after `validation.max_tries` the file is quarantined. A claim that ran out is such a
fault, so claims leave time to load the version. Weights that no relay delivers say nothing about the file, so an outage is waited
out for a while before it counts. Waits double, or a fault that returns at once would use up every try while a relay restarts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.protocol.verdicts import Reason

FIRST_WAIT_S = 2.0
LONGEST_WAIT_S = 60.0
VERSION_OUTAGE_S = 900.0
"""Since the upload. Later a version that no relay delivers counts as a try, or a lost one could hold a step for ever."""

READ_BYTES_S = 100e6
"""At which the slowest admitted disk gives a version to an engine."""


@dataclass(frozen=True, slots=True)
class Retry:
    faults: int
    tries: int
    wait_s: float


def after_fault(reasons: Sequence[Reason], age_s: float, tries: int, faults: int, max_tries: int) -> Retry | None:
    """How the submission is tried again; none if it is quarantined."""
    counted = counts(reasons, age_s)
    if counted and tries >= max_tries:
        return None
    return Retry(faults + 1, tries if counted else tries - 1, wait_s(faults + 1))


def claim_s(checking_s: float, version_bytes: int) -> float:
    """How long a claim lasts: a validator may have to read a version of many gigabytes before it checks the file."""
    return checking_s + version_bytes // READ_BYTES_S


def wait_s(faults: int) -> float:
    """How long to wait after the n-th fault in a row."""
    return float(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (faults - 1)))


def counts(reasons: Sequence[Reason], age_s: float) -> bool:
    """Whether a fault with these reasons counts as a try."""
    return list(reasons) != [Reason.VERSION_GONE] or age_s > VERSION_OUTAGE_S
