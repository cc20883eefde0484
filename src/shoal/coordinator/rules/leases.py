"""May this key work, on which slot, with which version, and for how long: one pure decision.

The lease names the policy version: the newest inside the asynchrony window that the worker holds. A dropped slot goes, unchanged,
to a different key, and a key that drops many gets no more of the step, so workers cannot select easy slots. While other keys work,
no key fills more than its share of a step; while active keys work, neither do all keys on probation together. A key *works* if it
is present and was granted a lease lately: heartbeats alone would let an idle key stall the swarm. Shares never stop a step that
has nothing outstanding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.config import TrainingConfig, TrustConfig
from shoal.coordinator.rules import batches
from shoal.protocol.api import RunState

LEASES_PER_KEY = 2
"""One being worked on, one being uploaded."""
POLLS_PER_S = 400
"""Idle workers of a large swarm ask less often, so that together they ask no more than this."""
SHORTEST_LEASE_S = 10.0
LEASE_MARGIN = 4.0
"""A lease lasts this many times the expected work: a laptop that is also used for something else still makes it."""
DROPS_PER_STEP = 4
"""Two outages with two leases each are bad luck."""

Refusal = Literal["no_work", "need_weights", "waiting_for_trainer", "paused", "draining", "disk_full", "finished"]
RETRY_AFTER_S: dict[Refusal, float] = {
    "no_work": 0.25,
    "need_weights": 0.25,
    "waiting_for_trainer": 0.25,
    "paused": 2.0,
    "draining": 2.0,
    "finished": 2.0,
    "disk_full": 5.0,
}
AFTER_LAST_STEP_S = 1.0
"""All batches are formed; the run ends when the trainer has published the last version."""


@dataclass(frozen=True, slots=True)
class KeyView:
    """The key that asks."""

    is_active: bool
    """Whether it has left probation."""
    held_versions: Sequence[int]
    leases_held: int
    slots_of_step: int
    """Slots of this step that it holds or has submitted."""
    drops_of_step: int
    """Leases of this step that it gave back or let expire."""
    dropped_slot: int | None
    """The first slot of this step that other keys dropped."""


@dataclass(frozen=True, slots=True)
class SwarmView:
    """The run and its current step."""

    run_state: RunState
    step: int
    steps: int
    has_space: bool
    published: Sequence[int]
    """Versions; those outside the asynchrony window may be left out."""
    counts: batches.StepCounts
    next_slot: int
    tasks_per_slot: int
    keys_present: int
    has_other_workers: bool
    """Whether another key works."""
    has_other_active_workers: bool
    """Whether another key that has left probation works."""


@dataclass(frozen=True, slots=True)
class Grant:
    step: int
    slot: int
    """One that another key dropped, or the next of the step."""
    version: int
    wanted_version: int


@dataclass(frozen=True, slots=True)
class Refused:
    reason: Refusal
    retry_after_s: float
    wanted_version: int | None = None


def decide(swarm: SwarmView, key: KeyView, training: TrainingConfig, trust: TrustConfig) -> Grant | Refused:
    """The whole answer to a request for work."""

    def refuse(reason: Refusal, wanted: int | None = None) -> Refused:
        return Refused(reason, _retry_after_s(reason, swarm), wanted)

    stopped = _stopped(swarm)
    if stopped is not None:
        return refuse(stopped)
    wanted = wanted_version(swarm.published, swarm.step, training.async_level)
    if wanted is None:
        return refuse("waiting_for_trainer")
    version = leased_version(key.held_versions, swarm.published, swarm.step, training.async_level)
    if version is None:
        return refuse("need_weights", wanted)
    if not _has_work(swarm, key, training, trust):
        return refuse("no_work", wanted)
    slot = swarm.next_slot if key.dropped_slot is None else key.dropped_slot
    return Grant(swarm.step, slot, version, wanted)


def _stopped(swarm: SwarmView) -> Refusal | None:
    """Why nobody gets work."""
    if swarm.run_state == "drained":
        return "draining"
    if swarm.run_state != "running":
        return swarm.run_state
    if swarm.step >= swarm.steps:
        return "no_work"
    return None if swarm.has_space else "disk_full"


def _has_work(swarm: SwarmView, key: KeyView, training: TrainingConfig, trust: TrustConfig) -> bool:
    if key.leases_held >= LEASES_PER_KEY:
        return False
    wanted = batches.groups_wanted(swarm.counts, training)
    return wanted > 0 and may_lease(_load(swarm, key, wanted), not key.is_active, trust)


def _retry_after_s(reason: Refusal, swarm: SwarmView) -> float:
    is_over = reason == "no_work" and swarm.step >= swarm.steps
    return max(AFTER_LAST_STEP_S if is_over else RETRY_AFTER_S[reason], swarm.keys_present / POLLS_PER_S)


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
    has_other_workers: bool
    has_other_active_workers: bool


def _load(swarm: SwarmView, key: KeyView, wanted: int) -> StepLoad:
    counts = swarm.counts
    return StepLoad(
        slots_of_key=key.slots_of_step,
        drops_of_key=key.drops_of_step,
        slots_of_probation=counts.probation_slots,
        slots_planned=-(-(counts.resolved_groups + counts.outstanding_groups + wanted) // swarm.tasks_per_slot),
        slots_outstanding=counts.outstanding_groups // swarm.tasks_per_slot,
        has_other_workers=swarm.has_other_workers,
        has_other_active_workers=swarm.has_other_active_workers,
    )


def may_lease(load: StepLoad, on_probation: bool, trust: TrustConfig) -> bool:
    if load.has_other_workers and load.drops_of_key >= DROPS_PER_STEP:
        return False
    if load.slots_outstanding == 0:
        return True
    if load.has_other_workers and load.slots_of_key >= _share(trust.key_share, load.slots_planned):
        return False
    if on_probation and load.has_other_active_workers:
        return load.slots_of_probation < _share(trust.probation_share, load.slots_planned)
    return True


def _share(fraction: float, slots: int) -> int:
    return max(1, math.ceil(fraction * slots))
