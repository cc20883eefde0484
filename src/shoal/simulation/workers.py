"""Workers of a simulated run: honest ones of any speed, and those that misbehave in every way that is not a forgery."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shoal.errors import RefusedError
from shoal.protocol import api
from shoal.simulation.actors import Trainer, Work
from shoal.simulation.clock import EventClock
from shoal.simulation.coordinator import LocalCoordinator

Attack = Literal["stall", "return_late", "junk_late", "junk", "just_in_time"]
LAST_SECOND_S = 0.2
ASKS_AGAIN_S = 0.25
HELD_VERSIONS = 8
FETCH_S = 0.3
DAWDLING = 1.45
"""Times the usual work: as slow as a key can be without being late."""


@dataclass(frozen=True)
class Behaviour:
    """What a worker does with its leases; honest without an attack."""

    attack: Attack | None = None
    every: int = 1
    """It misbehaves with each lease of this number."""
    after: int = 0
    """Leases that it fills first, to earn its place."""
    with_backups_only: bool = False
    """It misbehaves only with slots that it takes for ones that another key had first."""
    claims_tokens_per_s: float = 1e6

    def misbehaves(self, number: int, is_again: bool) -> bool:
        if self.attack is None or number < self.after or (self.with_backups_only and not is_again):
            return False
        return (number - self.after) % self.every == self.every - 1


class Worker:
    """Asks, works, delivers, asks again. Its weights arrive a moment after they are published."""

    def __init__(
        self,
        coordinator: LocalCoordinator,
        clock: EventClock,
        trainer: Trainer,
        work: Work,
        junk: set[str],
        key: str,
        *,
        speed: float = 1.0,
        pauses: tuple[float, float] | None = None,
        behaviour: Behaviour | None = None,
    ) -> None:
        self.coordinator, self.clock, self.trainer, self.work, self.junk = coordinator, clock, trainer, work, junk
        self.key, self.speed, self.pauses, self.behaviour = key, speed, pauses, behaviour or Behaviour()
        self._requests, self._leases = itertools.count(), itertools.count()
        self._newest_slot = (-1, -1)
        coordinator.register(key, self.behaviour.claims_tokens_per_s)
        clock.after(0.0, self._ask)

    def _held(self) -> list[int]:
        ready = [version for version, at in enumerate(self.trainer.published_at) if at + FETCH_S <= self.clock()]
        return ready[-HELD_VERSIONS:] or [0]

    def _ask(self) -> None:
        try:
            answer = self.coordinator.lease(self.key, f"{self.key[:16]}-{next(self._requests):08}", self._held())
        except RefusedError:
            return  # banned: it is out of the run
        if answer.lease is None:
            self.clock.after(answer.retry_after_s, self._ask)
        else:
            self._begin(answer.lease)

    def _begin(self, lease: api.Lease) -> None:
        is_again = (lease.step, lease.slot) < self._newest_slot
        self._newest_slot = max(self._newest_slot, (lease.step, lease.slot))
        needed_s = self.work.duration_s(lease.slot_seed, self.speed) + self._pause_s()
        if not self.behaviour.misbehaves(next(self._leases), is_again):
            self.clock.after(needed_s, lambda: self._deliver(lease))
        else:
            self._misbehave(lease, needed_s)

    def _misbehave(self, lease: api.Lease, needed_s: float) -> None:
        left_s = lease.expires_at - self.clock() - LAST_SECOND_S
        attack, events = self.behaviour.attack, self.clock
        if attack == "stall":
            events.after(ASKS_AGAIN_S, self._ask)  # it takes as many slots as it gets
        elif attack == "return_late":
            events.after(left_s, lambda: self._give_back(lease))
        elif attack == "just_in_time":
            events.after(DAWDLING * self.work.seconds, lambda: self._deliver(lease))
        else:
            events.after(left_s if attack == "junk_late" else needed_s, lambda: self._spoil(lease))

    def _deliver(self, lease: api.Lease) -> None:
        self._finish(lambda: self.coordinator.submit(self.key, lease.lease_id, lease.lease_id.encode()))

    def _give_back(self, lease: api.Lease) -> None:
        self._finish(lambda: self.coordinator.give_back(self.key, lease.lease_id))

    def _spoil(self, lease: api.Lease) -> None:
        self.junk.add(lease.lease_id)
        self._deliver(lease)

    def _finish(self, act: Callable[[], None]) -> None:
        try:
            act()
        except RefusedError as refusal:
            if refusal.code == "banned":
                return
        self._ask()

    def _pause_s(self) -> float:
        """Time lost if the machine is busy with something else now: every so often, for so long."""
        if self.pauses is None:
            return 0.0
        every_s, length_s = self.pauses
        return length_s if self.clock() % every_s < self.work.seconds else 0.0
