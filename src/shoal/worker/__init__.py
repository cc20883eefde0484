"""The contributor's side: one loop that leases, generates, commits and submits."""

from shoal.worker.cheaters import CHEATERS
from shoal.worker.loop import Worker
from shoal.worker.totals import WorkerTotals
from shoal.worker.weights import WeightFollower

__all__ = ["CHEATERS", "WeightFollower", "Worker", "WorkerTotals"]
