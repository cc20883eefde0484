"""Records of deliveries: what a lease came to, and the pace of the keys that deliver. Runs inside one transaction of the store."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from shoal.coordinator.rules import deliveries, trust
from shoal.coordinator.run import Run
from shoal.coordinator.states import LeaseState
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import query
from shoal.coordinator.store.tables import DeliveringKey, LeaseRow, SubmissionRow, WorkerRow
from shoal.coordinator.work import slots
from shoal.coordinator.workers import delivery_record, known_worker, save_deliveries, trust_record

OBSERVED_KEYS = 64
"""The keys that delivered last are enough for a median, and cost the same in a swarm of any size."""

LATEST = (
    f"SELECT {', '.join(field.name for field in fields(DeliveringKey))} FROM workers"
    f" WHERE delivered_at > 0 AND state <> 'banned' ORDER BY delivered_at DESC LIMIT {OBSERVED_KEYS}"
)


@dataclass(frozen=True)
class Observed:
    """The keys that delivered lately, and what can be expected of a key."""

    workers: Sequence[DeliveringKey]
    pace: deliveries.Pace
    is_enforced: bool
    """Whether batches wait for reliable keys only."""

    def is_reliable(self, run: Run, worker: WorkerRow | DeliveringKey) -> bool:
        """Whether batches wait for the slots of this key; work that would not be used is never waited for."""
        if not trust.is_usable(trust_record(worker), run.config.trust):
            return False
        return not self.is_enforced or deliveries.is_reliable(delivery_record(worker), self.pace)

    def reliable_keys(self, run: Run, numerics_class: str) -> list[str]:
        """Keys that may fill a late slot of this class."""
        same = [worker for worker in self.workers if worker.numerics_class == numerics_class]
        return [worker.key for worker in same if self.is_reliable(run, worker)]


def observe(connection: Connection, run: Run) -> Observed:
    longest_s = run.config.coordinator.lease_s
    present = [worker for worker in query(connection, DeliveringKey, LATEST) if run.presence.is_present(worker.key)]
    newest_at = max((worker.delivered_at for worker in present), default=0.0)
    workers, records = [], []
    for worker in present:
        record = delivery_record(worker)
        if deliveries.is_current(record, newest_at - worker.delivered_at, longest_s):
            workers.append(worker)
            records.append(record)
    pace = deliveries.pace(records, longest_s)
    return Observed(workers, pace, deliveries.is_enforced(records, pace))


def record_delivery(connection: Connection, run: Run, row: SubmissionRow, lease: LeaseRow, tokens: int) -> WorkerRow:
    """Counts a file that was accepted."""
    worker = known_worker(connection, row.worker)
    pace = observe(connection, run).pace
    record = deliveries.after_delivery(delivery_record(worker), row.received_at - lease.issued_at, pace)
    record = deliveries.after_tokens(record, tokens, row.received_at - max(lease.issued_at, worker.received_at))
    received_at = max(worker.received_at, row.received_at)
    return save_deliveries(connection, worker, record, delivered_at=run.clock(), received_at=received_at)


def record_failure(connection: Connection, run: Run, key: str) -> WorkerRow:
    """Counts a lease that came to nothing."""
    worker = known_worker(connection, key)
    return save_deliveries(connection, worker, deliveries.after_failure(delivery_record(worker), run.clock()))


def drop_lease(connection: Connection, run: Run, lease: LeaseRow, state: LeaseState) -> None:
    """Ends a lease without a file that counts."""
    slots.drop_lease(connection, lease, state)
    record_failure(connection, run, lease.worker)
