"""Presence in a simulation: keys send heartbeats until they leave, so only keys that left can fall silent.

A heartbeat of ten thousand keys costs one assignment here; what follows from it is what `coordinator.presence` says.
"""

from collections.abc import Callable

from shoal.coordinator.presence import Presence, WorkerPresence


class BeatingPresence(Presence):
    def __init__(self, clock: Callable[[], float], gone_after_s: float) -> None:
        super().__init__(clock, gone_after_s)
        self.beat_at = clock()
        self.left: set[str] = set()
        self._quiet: set[str] = set()
        """Of these, those that may still count as present."""

    def seen(self, key: str) -> WorkerPresence:
        worker = self.workers.get(key)
        if worker is None:
            return super().seen(key)
        worker.seen_at = self.clock()
        return worker

    def leave(self, key: str) -> None:
        """Its last heartbeat was the last one of all keys."""
        worker = self.workers.get(key)
        if worker is not None:
            worker.seen_at = max(worker.seen_at, self.beat_at)
        self.left.add(key)
        self._quiet.add(key)

    def rejoin(self, key: str) -> None:
        self.left.discard(key)
        self._quiet.discard(key)

    def forget(self, key: str) -> None:
        super().forget(key)
        self._quiet.discard(key)

    def is_present(self, key: str) -> bool:
        return super().is_present(key) if key in self.left else key in self.workers

    def silent_at(self, key: str) -> float:
        """From when on a key that sends nothing more is absent."""
        worker = self.workers.get(key)
        if key not in self.left or worker is None:
            return float("inf")
        return worker.seen_at + self.gone_after_s

    def silent(self) -> list[str]:
        return [key for key in sorted(self._quiet) if key in self.workers and not self.is_present(key)]
