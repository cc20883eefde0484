"""What enters the engine next, and when the next lease is due. Pure.

A worker takes a lease just before its rows run out of samples: earlier, the lease would wait and its version would age; later,
rows would be idle. Once a newer version is ready it takes no more work of the old one, so that the rows in flight end and the
weights can be swapped. Samples that are expected to take long enter first, which keeps that tail short, and a slot that cannot end
before its deadline does not begin.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.tasks.workload import WorkItem

UNDELIVERED = 16
"""Finished slots that may wait for scoring and upload; then no lease is taken until one has left."""
EARLY = 2.0
"""A lease is asked for when the samples that wait would be used up within this many times what a lease takes to arrive."""
NEWEST_SHARE = 0.1
"""How much the newest completion counts in the running mean of lengths."""


@dataclass
class Lengths:
    """How long completions are: the mean of what was observed for each target length."""

    longest: int
    """The limit of the run: what is expected before anything was observed."""
    _means: dict[int, float] = field(default_factory=dict)

    def observe(self, target_length: int, tokens: int) -> None:
        before = self._means.get(target_length, float(tokens))
        self._means[target_length] = (1 - NEWEST_SHARE) * before + NEWEST_SHARE * tokens

    def expected(self, target_length: int) -> float:
        if target_length in self._means:
            return self._means[target_length]
        return max(self._means.values(), default=float(self.longest))

    @property
    def is_known(self) -> bool:
        return bool(self._means)


def entry_order(items: Sequence[WorkItem], lengths: Lengths) -> list[int]:
    """Samples of one slot, the longest expected first; those of a group stay together, since they share a prompt."""
    return sorted(range(len(items)), key=lambda at: (-lengths.expected(items[at].target_length), items[at].group, at))


def slot_s(items: Sequence[WorkItem], lengths: Lengths, step_s: float) -> float:
    """What a slot that begins now will take at least: its longest expected sample, one token per step."""
    return step_s * max(lengths.expected(item.target_length) for item in items)


@dataclass(frozen=True, slots=True)
class EngineView:
    rows: int
    unfinished: int
    """Requests in the engine."""
    waiting: int
    """Samples of leased slots that have not entered."""
    slot_samples: int
    undelivered: int
    """Slots that have ended and are not submitted."""
    has_newer_weights: bool
    """Whether a newer version than the loaded one is ready."""
    ends_per_s: float
    """Requests that end per second, lately."""
    lease_s: float
    """What a lease took to arrive, lately."""


def leases_wanted(view: EngineView) -> int:
    if view.undelivered >= UNDELIVERED:
        return 0
    if view.has_newer_weights and (view.unfinished or view.waiting):
        return 0
    free_soon = view.rows - view.unfinished + max(1, math.ceil(EARLY * view.ends_per_s * view.lease_s))
    return max(0, math.ceil((min(free_soon, 2 * view.rows) - view.waiting) / view.slot_samples))


@dataclass
class Rates:
    """How fast requests end and what a step takes: running means, by the monotonic clock."""

    step_s: float = 0.0
    ends_per_s: float = 0.0
    lease_s: float = 0.0

    def stepped(self, seconds: float, ended: int) -> None:
        self.step_s = _mean(self.step_s, seconds)
        self.ends_per_s = _mean(self.ends_per_s, ended / max(seconds, 1e-6))

    def leased(self, seconds: float) -> None:
        self.lease_s = _mean(self.lease_s, seconds, share=0.3)

    def doubt_step(self) -> None:
        """No slot begins because steps are too slow, and nothing runs that could show that they are fast again: after a machine
        slept, one step of an hour counts for minutes in the mean."""
        self.step_s /= 2


def _mean(before: float, newest: float, share: float = 0.02) -> float:
    return (1 - share) * before + share * newest if before else newest
