"""Workers of a simulated run: honest ones of any speed, and those that misbehave in every way that is not a forgery.

A hostile worker is as strong as it can be: it knows the code, and it reads from the coordinator what a real one could only guess,
namely whether batches wait for it and until when a file counts as in time.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from shoal.errors import RefusedError
from shoal.files import digest_bytes
from shoal.protocol import api
from shoal.simulation.actors import Trainer, Work
from shoal.simulation.clock import EventClock
from shoal.simulation.operations import Operations

Attack = Literal[
    "stall",
    "idle",
    "return",
    "return_late",
    "junk",
    "junk_at_once",
    "junk_late",
    "just_in_time",
    "just_late",
    "old_version",
]
LAST_SECOND_S = 0.2
ASKS_AGAIN_S = 0.25
HELD_VERSIONS = 8
FETCH_S = 0.3
IN_TIME, LATE = 0.99, 1.02
"""Times the limit for a file in time: as slow as a key can be without being late, and so late that a backup has begun."""


@dataclass(frozen=True)
class Behaviour:
    """What a worker does with its leases; honest without an attack. All conditions must hold for a lease to be misused."""

    attack: Attack | None = None
    every: int = 1
    """It misbehaves with each lease of this number."""
    after: int = 0
    """Leases that it fills first, to earn its place."""
    with_backups_only: bool = False
    """Only with slots that it takes for ones that another key had first."""
    when_reliable: bool = False
    """Only while batches wait for its slots: it works until they do, again and again."""
    every_step: int = 1
    """Only in each step of this number, so that all such keys do it together."""
    renews: bool = False
    """It goes on with a new key afterwards."""
    claims_tokens_per_s: float = 1e6

    def misbehaves(self, number: int, step: int, *, is_again: bool, is_reliable: bool) -> bool:
        if self.attack is None or number < self.after or step % self.every_step != self.every_step - 1:
            return False
        if (self.with_backups_only and not is_again) or (self.when_reliable and not is_reliable):
            return False
        return (number - self.after) % self.every == self.every - 1


@dataclass
class World:
    """What all workers of a scenario share."""

    coordinator: Operations
    clock: EventClock
    trainer: Trainer
    work: Work
    junk: set[str] = field(default_factory=set)
    """Leases whose files do not hold."""
    keys: set[str] = field(default_factory=set)
    """Keys that send heartbeats."""


class Worker:
    """Asks, works, delivers, asks again. Its weights arrive a moment after they are published."""

    def __init__(
        self,
        world: World,
        name: str,
        *,
        speed: float = 1.0,
        pauses: tuple[float, float] | None = None,
        behaviour: Behaviour | None = None,
    ) -> None:
        self.world, self.coordinator, self.clock, self.work = world, world.coordinator, world.clock, world.work
        self.name, self.speed, self.pauses, self.behaviour = name, speed, pauses, behaviour or Behaviour()
        self._requests, self._leases, self._names = itertools.count(), itertools.count(), itertools.count(1)
        self._newest_slot = (-1, -1)
        self._join(name)
        self.clock.after(0.0, self._ask)

    def _join(self, name: str) -> None:
        self.key = digest_bytes(name.encode())
        self.world.keys.add(self.key)
        self.coordinator.register(self.key, self.behaviour.claims_tokens_per_s)

    def _ready(self) -> list[int]:
        """The versions that it holds."""
        published = self.world.trainer.published_at
        return [version for version, at in enumerate(published) if at + FETCH_S <= self.clock()][-HELD_VERSIONS:] or [0]

    def _ask(self) -> None:
        try:
            answer = self._answer()
        except RefusedError:
            return  # banned: it is out of the run
        if answer.lease is None:
            self.clock.after(answer.retry_after_s, self._ask)
        else:
            self._begin(answer.lease)

    def _answer(self) -> api.LeaseAnswer:
        ready = self._ready()
        if self.behaviour.attack != "old_version":
            return self._lease(ready)
        # The oldest version that the coordinator still gives work for is found by trying.
        answers = (self._lease([version]) for version in ready)
        answer = next(answers)
        while answer.reason == "need_weights" and (newer := next(answers, None)) is not None:
            answer = newer
        return answer

    def _lease(self, held: list[int]) -> api.LeaseAnswer:
        return self.coordinator.lease(self.key, f"{self.key[:16]}-{next(self._requests):08}", held)

    def _begin(self, lease: api.Lease) -> None:
        is_again = (lease.step, lease.slot) < self._newest_slot
        self._newest_slot = max(self._newest_slot, (lease.step, lease.slot))
        needed_s = self.work.duration_s(lease.slot_seed, self.speed) + self._pause_s()
        number, is_reliable = next(self._leases), self.coordinator.is_reliable(self.key)
        if self.behaviour.misbehaves(number, lease.step, is_again=is_again, is_reliable=is_reliable):
            self._misbehave(lease, needed_s)
        else:
            self.clock.after(needed_s, lambda: self._deliver(lease))

    def _misbehave(self, lease: api.Lease, needed_s: float) -> None:
        left_s, in_time_s = lease.expires_at - self.clock() - LAST_SECOND_S, self.coordinator.pace().in_time_s
        key, later = self.key, self.clock.after
        match self.behaviour.attack:
            case "stall":
                self._renew()  # it takes as many slots as it gets
            case "return" | "return_late":
                later(0.0 if self.behaviour.attack == "return" else left_s, lambda: self._give_back(lease))
            case "junk" | "junk_late" | "junk_at_once" as attack:
                waits_s = {"junk": needed_s, "junk_late": left_s, "junk_at_once": 0.0}[attack]
                later(waits_s, lambda: self._spoil(lease))
            case "just_in_time" | "just_late":
                factor = IN_TIME if self.behaviour.attack == "just_in_time" else LATE
                later(min(left_s, max(needed_s, factor * in_time_s)), lambda: self._deliver(lease))
            case "old_version":
                later(needed_s, lambda: self._deliver(lease))
            case "idle":
                self.world.keys.add(key)  # only its heartbeats go on

    def _renew(self) -> None:
        """Asks again, with a new key if it takes one."""
        if self.behaviour.renews:
            self._join(f"{self.name} {next(self._names)}")
        self.clock.after(ASKS_AGAIN_S, self._ask)

    def _deliver(self, lease: api.Lease) -> None:
        key = self.key
        self._finish(lambda: self.coordinator.submit(key, lease.lease_id, lease.lease_id.encode()), self._ask)

    def _give_back(self, lease: api.Lease) -> None:
        key = self.key
        self._finish(lambda: self.coordinator.give_back(key, lease.lease_id), self._renew)

    def _spoil(self, lease: api.Lease) -> None:
        key = self.key
        self.world.junk.add(lease.lease_id)
        self._finish(lambda: self.coordinator.submit(key, lease.lease_id, lease.lease_id.encode()), self._renew)

    def _finish(self, act: Callable[[], None], go_on: Callable[[], None]) -> None:
        try:
            act()
        except RefusedError as refusal:
            if refusal.code == "banned" and not self.behaviour.renews:
                return
        go_on()

    def _pause_s(self) -> float:
        """Time lost if the machine is busy with something else now: every so often, for so long."""
        if self.pauses is None:
            return 0.0
        every_s, length_s = self.pauses
        return length_s if self.clock() % every_s < self.work.seconds else 0.0
