"""When a submission that could not be judged is tried again, and when it is given up: pure rules, nobody is blamed.

Trouble over the file itself counts as a try; after `validation.max_tries` the file is set aside. Weights that no relay delivers say
nothing about the file, so an outage is waited out for a while before it counts. Waits double, or a fault that
returns at once would use up every try while a relay restarts.
"""

from collections.abc import Sequence

from shoal.protocol.verdicts import Reason

FIRST_WAIT_S = 2.0
LONGEST_WAIT_S = 60.0
OUTAGE_S = 900.0
"""Since the upload. Later a version that nobody delivers counts as a try, or a lost one could hold a step for ever."""


def wait_s(faults: int) -> float:
    """How long to wait after the n-th fault in a row."""
    return float(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (faults - 1)))


def counts(reasons: Sequence[Reason], age_s: float) -> bool:
    """Whether a fault with these reasons is held against the file."""
    return list(reasons) != [Reason.VERSION_GONE] or age_s > OUTAGE_S
