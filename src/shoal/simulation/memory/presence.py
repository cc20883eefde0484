"""Presence in a simulation: keys send heartbeats until they leave, so only keys that left can fall silent.

A heartbeat of ten thousand keys costs one assignment here; what follows from it is what `coordinator.presence` says.
"""

import heapq
from collections.abc import Callable, Iterable

from shoal.coordinator.presence import POLLERS_S, Presence, WorkerPresence
from shoal.simulation.memory.tables import Key


class CountedPollers:
    """`coordinator.presence.Pollers` with numbers in place of sets: each key remembers the turn in which it was counted."""

    def __init__(self) -> None:
        self.since, self.number, self.newest, self.before = 0.0, 0, 0, 0

    def turn(self, now: float) -> None:
        self.before = self.newest if now - self.since < 2 * POLLERS_S else 0
        self.newest, self.since, self.number = 0, now, self.number + 1


class BeatingPresence(Presence):
    def __init__(self, clock: Callable[[], float], gone_after_s: float) -> None:
        super().__init__(clock, gone_after_s)
        self.beat_at = clock()
        self.left: set[str] = set()
        self.pollers_of = (CountedPollers(), CountedPollers())
        """Of all keys, and of those that have delivered."""
        self._quiet: list[tuple[float, str]] = []
        """Heap of those that may still count as present, by when they do not any more."""

    def seen(self, key: str) -> WorkerPresence:
        worker = self.workers.get(key)
        if worker is None:
            return super().seen(key)
        worker.seen_at = self.clock()
        return worker

    def asked(self, key: Key, now: float) -> None:
        """A key that is present asks for work: `seen` and `note_asking` for one moment."""
        self.polling_and_asked(key, now)

    def polling_and_asked(self, key: Key, now: float) -> int:
        """`polling_at` for this key, and then `asked`: one call for the most frequent request."""
        key.asked_at, everybody = now, self.pollers_of[False]
        if now - everybody.since >= POLLERS_S:
            everybody.turn(now)
        polling = everybody.newest if everybody.newest > everybody.before else everybody.before
        if key.turns[0] != everybody.number:
            key.turns[0], everybody.newest = everybody.number, everybody.newest + 1
        if key.delivered_at > 0:
            delivering = self.pollers_of[True]
            if now - delivering.since >= POLLERS_S:
                delivering.turn(now)
            polling = delivering.newest if delivering.newest > delivering.before else delivering.before
            if key.turns[1] != delivering.number:
                key.turns[1], delivering.newest = delivering.number, delivering.newest + 1
        return polling

    def polling_at(self, now: float, *, has_delivered: bool) -> int:
        """`polling` for one moment."""
        pollers = self.pollers_of[has_delivered]
        if now - pollers.since >= POLLERS_S:
            pollers.turn(now)
        return pollers.newest if pollers.newest > pollers.before else pollers.before

    def leave(self, key: str, asked_at: float = 0.0) -> None:
        """Its last heartbeat was the last one of all keys."""
        worker = self.workers.get(key)
        if worker is not None:
            worker.seen_at = max(worker.seen_at, self.beat_at, asked_at)
        self.left.add(key)
        heapq.heappush(self._quiet, (self.silent_at(key), key))

    def rejoin(self, key: str) -> None:
        self.left.discard(key)

    def is_present(self, key: str) -> bool:
        return super().is_present(key) if key in self.left else key in self.workers

    def present(self, keys: Iterable[Key]) -> list[Key]:
        left, workers = self.left, self.workers
        return [one for one in keys if one.key in workers and (one.key not in left or self.is_present(one.key))]

    def first_silent_at(self, keys: Iterable[Key]) -> float:
        """From when on one of them may be absent."""
        left = self.left
        return min([self.silent_at(one.key) for one in keys if one.key in left], default=float("inf"))

    def silent_at(self, key: str) -> float:
        """From when on a key that sends nothing more is absent."""
        worker = self.workers.get(key)
        if key not in self.left or worker is None:
            return float("inf")
        return worker.seen_at + self.gone_after_s

    def silent(self) -> list[str]:
        found = []
        while self._quiet and self._quiet[0][0] < self.clock():
            _, key = heapq.heappop(self._quiet)
            if key in self.left and key in self.workers:
                if self.is_present(key):  # something of it arrived after it had left
                    heapq.heappush(self._quiet, (self.silent_at(key), key))
                else:
                    found.append(key)
        return found
