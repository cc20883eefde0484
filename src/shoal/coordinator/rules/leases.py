"""May this key work, on which slot, with which version, and for how long: one pure decision.

The lease names the policy version: the newest inside the asynchrony window that the worker holds, and none older than what every
key has had the time to fetch. A slot whose key is late goes to a second one with the same version. A dropped slot goes, unchanged,
to a different key, and a key that fails again and again waits longer and longer, so workers cannot select easy slots. While other
keys work, no key fills more than its share of a step; while active keys work, neither do all keys on probation together. A key
*works* if it is present, was granted a lease lately and does not fail: heartbeats alone would let an idle key stall the swarm.
Shares never stop a step that has nothing outstanding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from shoal.config import TrainingConfig, TrustConfig
from shoal.coordinator.rules import batches
from shoal.protocol.api import RunState

POLLS_PER_S = 200
"""Idle workers of a large swarm ask less often, so that together they ask no more than this."""
LONGEST_WAIT_S = 30.0
"""A key that waits for its next lease asks again by then."""

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
class OpenSlot:
    slot: int
    version: int
    """The one that its first key worked with: the same slot, version and numerics class give the same tokens."""


@dataclass(frozen=True, slots=True)
class KeyView:
    """The key that asks."""

    is_active: bool
    """Whether it has left probation."""
    held_versions: Sequence[int]
    leases_held: int
    leases_allowed: int
    """By the observed speed of the key; see `deliveries.leases_allowed`."""
    slots_of_step: int
    """Slots of this step that it holds or has submitted."""
    open_slot: OpenSlot | None = None
    """The first slot of this step that other keys dropped and that this one may take."""
    late_slot: OpenSlot | None = None
    """A slot of this step whose keys are late, if this one was drawn to fill it too."""
    is_reliable: bool = True
    """Whether a batch waits for its slots."""
    backoff_s: float = 0.0
    """How long it still waits after its failures."""
    slots_of_next: int = 0
    """As `slots_of_step`, of the step after this one."""
    open_slot_of_next: OpenSlot | None = None


class SwarmView(NamedTuple):
    """The run and its current step. A simulation makes thousands of them per second."""

    run_state: RunState
    step: int
    steps: int
    has_space: bool
    published: Sequence[int]
    """Versions; those outside the asynchrony window may be left out."""
    settled_version: int | None
    """The newest that every key has had the time to fetch."""
    counts: batches.StepCounts
    next_slot: int
    tasks_per_slot: int
    keys_polling: int
    """Keys that ask for work."""
    has_other_workers: bool
    """Whether another key works."""
    has_other_active_workers: bool
    """Whether another key that has left probation works."""
    awaited_version: int = 0
    """New work waits for this one, as `rules.freshness` decided."""
    useful_share: float | None = None
    """Of generated groups, as `rules.freshness` measured it."""
    has_time: bool = False
    """Whether the batch can be filled without a surplus, as it decided."""
    ahead: "NextStep | None" = None
    """The step after this one, while the trainer waits for the batch of this one."""


class NextStep(NamedTuple):
    counts: batches.StepCounts
    next_slot: int


@dataclass(frozen=True, slots=True)
class Grant:
    step: int
    """The current one, or the next one if all groups of the current one are under way."""
    slot: int
    """One that another key dropped, or the next of the step."""
    version: int
    wanted_version: int
    deferred: bool = False
    """Whether its groups wait for the next step."""


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
    if version is None or version < _oldest_leased(swarm, training.async_level):
        return refuse("need_weights", wanted)
    if key.backoff_s > 0 and swarm.has_other_workers:
        return Refused("no_work", min(LONGEST_WAIT_S, key.backoff_s), wanted)
    late = key.late_slot
    if late is not None and key.leases_held < key.leases_allowed:
        return Grant(swarm.step, late.slot, late.version, wanted)
    if wanted < swarm.awaited_version:
        return refuse("waiting_for_trainer", wanted)
    if version < swarm.awaited_version:
        return refuse("need_weights", wanted)
    if has_work(swarm, key, training, trust):
        slot, version = _next_slot(swarm, key, version, training.async_level)
        return Grant(swarm.step, slot, version, wanted, deferred=not key.is_reliable)
    if version == swarm.step and has_work_ahead(swarm, key, training, trust):
        slot, version = _next_slot(next_step(swarm, training), _in_next_step(key), version, training.async_level)
        return Grant(swarm.step + 1, slot, version, wanted)
    return refuse("no_work", wanted)


def _oldest_leased(swarm: SwarmView, async_level: int) -> int:
    """A key that names only older versions lies about what it holds, or has to catch up first."""
    oldest = swarm.step - async_level
    return oldest if swarm.settled_version is None else max(oldest, swarm.settled_version)


def _next_slot(swarm: SwarmView, key: KeyView, version: int, async_level: int) -> tuple[int, int]:
    """A slot that was dropped comes first, with the version of its first lease if the key holds that one."""
    again = key.open_slot
    if again is None:
        return swarm.next_slot, version
    held = set(key.held_versions) & {again.version}
    same = leased_version(list(held), swarm.published, swarm.step, async_level)
    return again.slot, version if same is None else same


def _stopped(swarm: SwarmView) -> Refusal | None:
    """Why nobody gets work."""
    if swarm.run_state == "drained":
        return "draining"
    if swarm.run_state != "running":
        return swarm.run_state
    if swarm.step >= swarm.steps:
        return "no_work"
    return None if swarm.has_space else "disk_full"


def has_work(swarm: SwarmView, key: KeyView, training: TrainingConfig, trust: TrustConfig) -> bool:
    """Whether the step needs more groups, and the limits of the key and of the step let it have them."""
    if key.leases_held >= key.leases_allowed:
        return False
    wanted = groups_wanted(swarm, training, is_reliable=key.is_reliable)
    return wanted > 0 and may_lease(step_load(swarm, key, wanted), not key.is_active, trust)


def has_work_ahead(swarm: SwarmView, key: KeyView, training: TrainingConfig, trust: TrustConfig) -> bool:
    """Whether the key may begin with the next step, because the current one needs no more groups and only waits for those that
    are under way. The trainer waits too, so the next step has no newer version to wait for. Nobody waits for other keys anyway."""
    if swarm.ahead is None or not key.is_reliable or groups_wanted(swarm, training, is_reliable=True) > 0:
        return False
    return has_work(next_step(swarm, training), _in_next_step(key), training, trust)


def next_step(swarm: SwarmView, training: TrainingConfig) -> SwarmView:
    """What will be known of the next step when it begins, as far as one can tell; what is uncertain of its need is leased then."""
    assert swarm.ahead is not None, "the trainer waits"
    counts = batches.counts_of_next(swarm.counts, swarm.ahead.counts, training, swarm.useful_share)
    return swarm._replace(
        step=swarm.step + 1, counts=counts, next_slot=swarm.ahead.next_slot, has_time=True, ahead=None
    )


def _in_next_step(key: KeyView) -> KeyView:
    return replace(key, slots_of_step=key.slots_of_next, open_slot=key.open_slot_of_next)


def groups_wanted(swarm: SwarmView, training: TrainingConfig, *, is_reliable: bool) -> int:
    """Of such keys, whatever their limits."""
    if is_reliable:
        return batches.groups_wanted(swarm.counts, training, swarm.useful_share, has_time=swarm.has_time)
    return batches.deferred_wanted(swarm.counts, training)


def _retry_after_s(reason: Refusal, swarm: SwarmView) -> float:
    is_over = reason == "no_work" and swarm.step >= swarm.steps
    return max(AFTER_LAST_STEP_S if is_over else RETRY_AFTER_S[reason], poll_s(swarm.keys_polling))


def poll_s(keys_polling: int) -> float:
    """How long an idle key waits between two requests for work."""
    return max(RETRY_AFTER_S["no_work"], keys_polling / POLLS_PER_S)


def leased_version(held: Sequence[int], published: Sequence[int], step: int, async_level: int) -> int | None:
    """The newest published version inside s−k … s that the worker holds."""
    allowed = {version for version in published if step - async_level <= version <= step}
    return max(allowed.intersection(held), default=None)


def wanted_version(published: Sequence[int], step: int, async_level: int) -> int | None:
    """The newest published version that work of this step may use; none while the trainer is behind."""
    return max((version for version in published if step - async_level <= version <= step), default=None)


class StepLoad(NamedTuple):
    """How the slots of the current step are spread over keys."""

    slots_of_key: int
    slots_of_probation: int
    slots_planned: int
    slots_outstanding: int
    has_other_workers: bool
    has_other_active_workers: bool


def step_load(swarm: SwarmView, key: KeyView, wanted: int) -> StepLoad:
    counts = swarm.counts
    ahead = 0 if key.is_reliable else counts.deferred.outstanding_groups
    outstanding = counts.outstanding_groups + ahead
    return StepLoad(
        slots_of_key=key.slots_of_step,
        slots_of_probation=counts.probation_slots,
        slots_planned=-(-(counts.resolved_groups + outstanding + wanted) // swarm.tasks_per_slot),
        slots_outstanding=outstanding // swarm.tasks_per_slot,
        has_other_workers=swarm.has_other_workers,
        has_other_active_workers=swarm.has_other_active_workers,
    )


def may_lease(load: StepLoad, on_probation: bool, trust: TrustConfig) -> bool:
    if load.slots_outstanding == 0:
        return True
    if load.has_other_workers and load.slots_of_key >= _share(trust.key_share, load.slots_planned):
        return False
    if on_probation and load.has_other_active_workers:
        return load.slots_of_probation < _share(trust.probation_share, load.slots_planned)
    return True


def _share(fraction: float, slots: int) -> int:
    return max(1, math.ceil(fraction * slots))
