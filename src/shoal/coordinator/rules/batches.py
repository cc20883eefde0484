"""Which groups make the batch of a step, and which groups expire: a pure decision over what was accepted so far.

Groups enter in slot order, because the order of arrival favours short answers. A slot that a reliable key fills therefore holds
back later slots. Slots of other keys are *deferred*: they hold back none and are not counted on, and their groups enter the batch
of the next step. A batch is formed when P useful groups are ready, or when the oversampling cap is reached and nothing is
outstanding. Groups that are too old for it expire with it.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.config import TrainingConfig, TrustConfig
from shoal.coordinator.rules.unaudited import limit_of_key

FIRST_SLACK = 1.25
"""Expected useful groups over those needed, while the share of useful groups has not been measured."""
DEVIATIONS = 1.5
"""Afterwards as many standard deviations of the useful ones: a shortage costs the time of one more slot, a surplus its work."""
BLOCKING_ATTEMPTS = 4
"""A slot that this many reliable keys have dropped or kept for too long holds back none."""
PRIOR_SHARE = 0.5
"""Of useful groups, while no step has been measured."""
PRIOR_GROUPS = 8
"""Its weight beside the groups of the step. A measured share weighs as much as one batch: less, and the noise of the first groups
would lease more; more, and a step whose groups are suddenly poor would ask for too few, again and again."""


@dataclass(frozen=True, order=True, slots=True)
class GroupView:
    """A useful accepted group that no batch holds yet, ordered by its place in the run."""

    step: int
    slot: int
    number: int
    group_id: str
    policy_version: int
    deferred: bool = False
    """Whether it waits for the step after its own."""
    worker: str = ""
    audited: bool = True


@dataclass(frozen=True, slots=True)
class Deferred:
    """Deferred groups of a step: supply for the next one."""

    useful: int = 0
    outstanding_groups: int = 0
    resolved_groups: int = 0


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The numbers of a step, known without looking at its groups; deferred ones are counted apart."""

    useful: int
    """Groups that no batch holds yet, also of earlier steps, and young enough."""
    useful_of_step: int
    outstanding_groups: int
    """Groups that leased or submitted slots of this step will bring."""
    resolved_groups: int
    """Groups of this step that were accepted, useful or not."""
    probation_slots: int = 0
    """Slots of this step that keys on probation hold or have submitted."""
    deferred: Deferred = Deferred()


@dataclass(frozen=True, slots=True)
class StepView:
    """What is known about the current step."""

    step: int
    counts: StepCounts
    waiting: Sequence[GroupView]
    """Useful groups, also of earlier steps, that are not in a batch."""
    blocking_slots: Sequence[int]
    """Slots of this step that reliable keys work on, or that are in validation."""


@dataclass(frozen=True, slots=True)
class Batch:
    groups: tuple[GroupView, ...]
    """In the order of training."""
    expired: tuple[GroupView, ...]


def decide(view: StepView, config: TrainingConfig, trust: TrustConfig) -> Batch | None:
    """The batch of the step; none while it waits for groups."""
    ready, oldest = _within_limit(_ready(view, config), config, trust), oldest_version(view.step, config)
    if len(ready) < config.groups_per_step and not _is_exhausted(view.counts, config):
        return None
    expired = tuple(group for group in view.waiting if group.policy_version < oldest)
    return Batch(tuple(ready[: config.groups_per_step]), expired)


def refill(view: StepView, kept: Sequence[GroupView], config: TrainingConfig, trust: TrustConfig) -> list[GroupView]:
    """Groups for the places that a proposed batch of this step has lost: those that would have been next."""
    chosen = _within_limit([*kept, *_ready(view, config)], config, trust)
    return [group for group in chosen if group not in kept][: max(0, config.groups_per_step - len(kept))]


def surplus(view: StepView, config: TrainingConfig, trust: TrustConfig) -> list[GroupView]:
    """Groups that could enter the batch, were they audited."""
    ready = _ready(view, config)
    within = set(_within_limit(ready, config, trust))
    return [group for group in ready if group not in within]


def _within_limit(ready: Sequence[GroupView], config: TrainingConfig, trust: TrustConfig) -> list[GroupView]:
    """Leaves out what one key has brought without an audit beyond its share of the batch."""
    limit, taken, chosen = limit_of_key(config, trust), Counter[str](), list[GroupView]()
    for group in ready:
        if not group.audited:
            taken[group.worker] += 1
        if group.audited or taken[group.worker] <= limit:
            chosen.append(group)
    return chosen


def _ready(view: StepView, config: TrainingConfig) -> list[GroupView]:
    """Groups that may enter the batch of the step, in order."""
    oldest = oldest_version(view.step, config)
    barrier = (view.step, min(view.blocking_slots, default=math.inf))
    useful = sorted(group for group in view.waiting if group.policy_version >= oldest)
    return [group for group in useful if (group.step, group.slot) < barrier and not _waits(group, view.step)]


def _waits(group: GroupView, step: int) -> bool:
    return group.deferred and group.step == step


def oldest_version(step: int, config: TrainingConfig) -> int:
    """The oldest policy version whose groups a batch of this step may hold."""
    return step - config.async_level


def may_be_complete(counts: StepCounts, config: TrainingConfig) -> bool:
    """Whether the batch could be formed; if not, its groups need not be read."""
    return counts.useful >= config.groups_per_step or _is_exhausted(counts, config)


def groups_wanted(
    counts: StepCounts, config: TrainingConfig, usual_share: float | None = None, *, has_time: bool = False
) -> int:
    """How many more groups should be generated so that enough of them are useful; `usual_share` of them were in the last steps.

    If there is time, no more are wanted than are needed, and slots that are under way are waited for before another begins for
    a fraction of a group: groups that one batch does not need are a version older in the next one.
    """
    share = _useful_share(counts, config, usual_share)
    needed = float(config.groups_per_step - counts.useful)
    if not has_time:
        is_first = usual_share is None
        needed += (FIRST_SLACK - 1) * config.groups_per_step if is_first else _margin(needed, share)
    missing = needed - share * counts.outstanding_groups
    waits = has_time and counts.outstanding_groups > 0
    wanted = math.floor(missing / share) if waits else math.ceil(missing / share)
    return max(0, min(wanted, _cap(config) - counts.resolved_groups - counts.outstanding_groups))


def _useful_share(counts: StepCounts, config: TrainingConfig, usual_share: float | None) -> float:
    """Of the groups that are under way."""
    measured = max(PRIOR_GROUPS, config.groups_per_step)
    known, prior = (PRIOR_GROUPS, PRIOR_SHARE) if usual_share is None else (measured, usual_share)
    return (known * prior + counts.useful_of_step) / (known + counts.resolved_groups)


def counts_of_next(
    counts: StepCounts, following: StepCounts, config: TrainingConfig, usual_share: float | None
) -> StepCounts:
    """Of the next step, with what the batch of this one will probably leave."""
    expected = counts.useful + _useful_share(counts, config, usual_share) * counts.outstanding_groups
    left = max(0.0, expected - config.groups_per_step)
    return replace(following, useful=following.useful + math.floor(left))


def _margin(needed: float, share: float) -> float:
    """How far the useful ones of as many groups as are needed may fall short. The share follows what comes in, so it needs none."""
    return DEVIATIONS * math.sqrt(max(0.0, needed * (1 - share)))


def deferred_wanted(counts: StepCounts, config: TrainingConfig) -> int:
    """How many more groups the next step can use from keys that no batch waits for."""
    ahead = counts.deferred
    return groups_wanted(
        StepCounts(ahead.useful, ahead.useful, ahead.outstanding_groups, ahead.resolved_groups), config
    )


def _is_exhausted(counts: StepCounts, config: TrainingConfig) -> bool:
    return counts.outstanding_groups == 0 and counts.resolved_groups >= _cap(config)


def _cap(config: TrainingConfig) -> int:
    return math.ceil(config.oversampling * config.groups_per_step)
