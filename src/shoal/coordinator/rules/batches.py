"""Which groups make the batch of a step: a pure decision over what was accepted so far.

Groups enter in slot order, because order of arrival favours short answers. A slot that is being worked on for the first time
therefore holds back later ones; a slot that was dropped once holds back nobody. A batch is formed when P useful groups are at
hand, or when the oversampling cap is reached and nothing is outstanding; groups that are too old expire.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.config import TrainingConfig


@dataclass(frozen=True, order=True)
class GroupView:
    """A useful accepted group that no batch holds yet, ordered by its place in the run."""

    step: int
    slot: int
    number: int
    group_id: str
    policy_version: int


@dataclass(frozen=True)
class StepView:
    """What is known about the current step."""

    step: int
    waiting: Sequence[GroupView]
    """Useful groups, also of earlier steps, that are not in a batch."""
    blocking_slots: Sequence[int]
    """Slots of this step on their first lease or in validation."""
    outstanding_groups: int
    """Groups that leased or submitted slots of this step will bring."""
    judged_groups: int
    """Groups of this step that were accepted, useful or not."""


@dataclass(frozen=True)
class StepCounts:
    """The numbers of a step, known without looking at its groups."""

    useful: int
    """Groups at hand, also of earlier steps, that are young enough."""
    useful_of_step: int
    outstanding_groups: int
    judged_groups: int
    unproven_slots: int = 0


@dataclass(frozen=True)
class Decision:
    """Either a batch (group ids in order), or how many more groups should be generated."""

    batch: tuple[str, ...] | None
    expired: tuple[str, ...]
    useful: int
    """Groups at hand that are young enough."""
    groups_wanted: int = 0


SLACK = 1.25
"""Expected useful groups in flight over those needed: hides the tail of the slowest slot."""
PRIOR_GROUPS = 8
"""Weight of the prior useful share of one half, so that the first verdicts do not swing the estimate."""


def decide(view: StepView, config: TrainingConfig) -> Decision:
    oldest = view.step - config.async_level
    expired = tuple(group.group_id for group in view.waiting if group.policy_version < oldest)
    useful = sorted(group for group in view.waiting if group.policy_version >= oldest)

    barrier = (view.step, min(view.blocking_slots, default=math.inf))
    ready = [group.group_id for group in useful if (group.step, group.slot) < barrier]
    of_step = sum(group.step == view.step for group in useful)
    counts = StepCounts(len(useful), of_step, view.outstanding_groups, view.judged_groups)
    if len(ready) >= config.groups_per_step or _is_exhausted(counts, config):
        return Decision(tuple(ready[: config.groups_per_step]), expired, len(useful))
    return Decision(None, expired, len(useful), groups_wanted(counts, config))


def may_be_complete(counts: StepCounts, config: TrainingConfig) -> bool:
    """Whether the batch could be formed; if not, nobody has to look at its groups."""
    return counts.useful >= config.groups_per_step or _is_exhausted(counts, config)


def groups_wanted(counts: StepCounts, config: TrainingConfig) -> int:
    """How many more groups should be generated so that enough of them are useful."""
    share = (PRIOR_GROUPS / 2 + counts.useful_of_step) / (PRIOR_GROUPS + counts.judged_groups)
    missing = SLACK * config.groups_per_step - counts.useful - share * counts.outstanding_groups
    wanted = math.ceil(missing / share) if missing > 0 else 0
    return max(0, min(wanted, _cap(config) - counts.judged_groups - counts.outstanding_groups))


def _is_exhausted(counts: StepCounts, config: TrainingConfig) -> bool:
    return counts.outstanding_groups == 0 and counts.judged_groups >= _cap(config)


def _cap(config: TrainingConfig) -> int:
    return math.ceil(config.oversampling * config.groups_per_step)
