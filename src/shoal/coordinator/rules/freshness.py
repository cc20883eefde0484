"""How long work may wait for a newer policy version, so that groups are fresh and the trainer does not wait. Pure.

Work of step s is leased as late as the trainer allows. The batch of s is needed when the trainer has finished step s−1; filling it
takes as long as the slowest of the last steps took, from its first lease to its batch, with a margin. Until then leases wait for
the newest version that arrives in time, at best s−1: its groups have age 1, the least without a trainer that waits. Only trained
steps and accepted batches are measured, never what keys say. Work is leased at once until enough cycles were measured (also after
a restart), when the trainer has no batch left, and when it is late already.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FEWEST_CYCLES = 3
MEMORY = 5
"""Cycles that count. The slowest filling and the fastest training of them decide, so one bad step ends the waiting."""
MARGIN = 1.25
"""Times the slowest filling, while leases wait."""
FIRST_MARGIN = 1.6
"""The same before leases begin to wait, so that a swarm at the limit does not change its mind at every step."""

Reason = Literal["measuring", "trainer_waits", "swarm_too_slow", "waits_for_version", "late"]


@dataclass(frozen=True, slots=True)
class Cycle:
    """One step that was trained."""

    fill_s: float
    """From its first lease until its batch was formed by accepted work."""
    train_s: float
    """From when trainer and batch were ready until the next version was published."""
    publish_s: float = 0.0
    """The part of it in which the trainer was already at the next step."""
    generated_groups: int = 0
    """That were accepted until the batch was formed, and ..."""
    useful_groups: int = 0
    """... those of them that could be trained on."""
    was_begun_ahead: bool = False
    """Whether its first lease came before the batch of the step before: the swarm filled both, so it seemed slower than it is."""


@dataclass(frozen=True, slots=True)
class TimingView:
    step: int
    """Whose work is asked for."""
    newest_version: int
    async_level: int
    trains_since: float
    """When the trainer could begin the step of the newest version."""
    now: float
    cycles: Sequence[Cycle]
    """The last ones of this process, oldest first."""
    is_waiting: bool
    """Whether leases waited at the last decision."""


@dataclass(frozen=True, slots=True)
class Timing:
    oldest_version: int
    """Leases of the step use no older one for now."""
    reason: Reason
    is_waiting: bool = False
    latest_start: float | None = None
    """When work is leased at the latest, whatever version is there."""

    useful_share: float | None = None
    """Of generated groups, as the last cycles had it; none before the first."""
    has_time: bool = False
    """Whether the batch can be filled without a surplus, which would be older in the next one."""


def decide(view: TimingView) -> Timing:
    """The oldest version that work of this step may use now."""
    oldest = view.step - view.async_level
    cycles = view.cycles[-MEMORY:]
    share = _useful_share(cycles)
    if len(cycles) < FEWEST_CYCLES:
        return Timing(oldest, "measuring", useful_share=share)
    if view.step <= view.newest_version:
        return Timing(oldest, "trainer_waits", view.is_waiting, useful_share=share)
    train_s = min(cycle.train_s for cycle in cycles)
    publish_s = max(cycle.publish_s for cycle in cycles)
    fill_s = slowest_fill_s(cycles) * (MARGIN if view.is_waiting else FIRST_MARGIN)
    if train_s <= fill_s + publish_s:
        return Timing(oldest, "swarm_too_slow", useful_share=share)
    needed_at = view.trains_since + (view.step - view.newest_version) * train_s - publish_s
    latest_start = needed_at - fill_s
    if view.now >= latest_start:
        return Timing(oldest, "late", True, latest_start, share)
    arriving = view.newest_version + max(0, int((latest_start - view.trains_since) // train_s))
    version = max(oldest, min(view.step - 1, arriving))
    return Timing(version, "waits_for_version", True, latest_start, share, has_time=True)


def slowest_fill_s(cycles: Sequence[Cycle]) -> float:
    """Of steps that had the swarm to themselves, if there are any."""
    alone = [cycle.fill_s for cycle in cycles if not cycle.was_begun_ahead]
    return max(alone or [cycle.fill_s for cycle in cycles])


def _useful_share(cycles: Sequence[Cycle]) -> float | None:
    """Of the last cycles; one group of each kind beside them keeps it off 0 and 1."""
    if not cycles:
        return None
    useful = sum(cycle.useful_groups for cycle in cycles)
    return (1 + useful) / (2 + sum(cycle.generated_groups for cycle in cycles))
