"""Which groups of a proposed batch are held back: a pure decision over the trainer's statistics.

The statistic of a group says how far its log-probability lies from what the trainer's policy expects of its own samples, in
standard deviations. No honest group of an admitted age comes near the limit; docs/design/verification.md shows the fit. A group
that was audited is what its seed selects, so it is never held back. The check alone penalises no worker: an audit follows.
"""

import math
from collections.abc import Collection, Mapping

MOST_ATTEMPTS = 3
"""Lists that are proposed for one step; the last one is recorded without the groups that it loses."""


def withheld(statistics: Mapping[str, float], audited: Collection[str], limit: float) -> set[str]:
    """Ids of the groups that go to an audit instead of into the batch."""
    return {
        group
        for group, value in statistics.items()
        if group not in audited and not (math.isfinite(value) and abs(value) <= limit)
    }
