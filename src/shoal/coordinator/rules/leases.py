"""Who may work on what: pure rules for leases.

The lease names the policy version, so nobody picks an old policy: it is the newest one that the worker holds inside the
asynchrony window. A dropped slot goes, unchanged, to a different key, and who drops many gets no more: nobody shops for easy
slots. No key fills more than its share of a step while others work, and neither do all keys on probation together while proven
ones work. *Work* means: was granted a lease lately; a key that only shows life could otherwise stall the swarm. And shares never
keep a step waiting on which nobody works.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.config import TrustConfig

SHORTEST_LEASE_S = 10.0
LEASE_MARGIN = 4.0
"""A lease lasts this many times the expected work: a laptop that is also used for something else still makes it."""
DROPS_PER_STEP = 4
"""Two outages with two leases each are bad luck."""


def leased_version(held: Sequence[int], published: Sequence[int], step: int, async_level: int) -> int | None:
    """The newest published version inside s−k … s that the worker holds."""
    allowed = {version for version in published if step - async_level <= version <= step}
    return max(allowed.intersection(held), default=None)


def wanted_version(published: Sequence[int], step: int, async_level: int) -> int | None:
    """The newest published version that work of this step may use; none while the trainer is behind."""
    return max((version for version in published if step - async_level <= version <= step), default=None)


def lease_seconds(tokens_per_s: float, slot_tokens: int, longest_s: float) -> float:
    """Time for a slot from the worker's measured speed."""
    return min(longest_s, max(SHORTEST_LEASE_S, LEASE_MARGIN * slot_tokens / tokens_per_s))


@dataclass(frozen=True)
class StepLoad:
    """How the slots of the current step are spread over keys."""

    slots_of_key: int
    drops_of_key: int
    slots_of_probation: int
    slots_planned: int
    slots_outstanding: int
    others_work: bool
    proven_work: bool


def may_lease(load: StepLoad, on_probation: bool, trust: TrustConfig) -> bool:
    if load.others_work and load.drops_of_key >= DROPS_PER_STEP:
        return False
    if load.slots_outstanding == 0:
        return True
    if load.others_work and load.slots_of_key >= _share(trust.key_share, load.slots_planned):
        return False
    if on_probation and load.proven_work:
        return load.slots_of_probation < _share(trust.probation_share, load.slots_planned)
    return True


def _share(fraction: float, slots: int) -> int:
    return max(1, math.ceil(fraction * slots))
