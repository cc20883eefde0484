"""The policy version in the engine, and which one comes after it."""

import time
from pathlib import Path

from shoal.metrics import EventLog
from shoal.policy.engine import Engine
from shoal.worker.slots import Version
from shoal.worker.totals import WorkerTotals
from shoal.worker.weights import WeightFollower


class LoadedPolicy:
    def __init__(self, engine: Engine, weights: WeightFollower, totals: WorkerTotals, metrics: EventLog) -> None:
        self.version: Version | None = None
        self._engine, self._weights, self._totals, self._metrics = engine, weights, totals, metrics

    def newer(self) -> Version | None:
        """The version to go on with; its number is lower if the owner withdrew the loaded one."""
        newest = self._weights.newest_held()
        return None if newest == self.version else newest

    def usable(self, *, any_will_do: bool) -> list[int]:
        """Versions that a lease may name: while there is other work, none of an older one is worth two swaps."""
        held = self._weights.held()
        if self.version is None or self.version[0] not in held or any_will_do:
            return held
        return [version for version in held if version >= self.version[0]]

    def load(self, version: Version, path: Path, *, stepped_at: float) -> None:
        """With nothing in the engine. `stepped_at` is when its last step ended, by the monotonic clock."""
        if self.version == version:
            return
        self.version = None
        ready_at = self._weights.ready_at(version[0])
        drain_s = max(0.0, stepped_at - ready_at) if ready_at is not None else 0.0
        started = time.monotonic()
        self._engine.load(path)
        seconds = time.monotonic() - started
        self._totals.swapped(drain_s, seconds)
        self._metrics.event("weights_swapped", version=version[0], drain_s=round(drain_s, 4), swap_s=round(seconds, 4))
        self.version = version
