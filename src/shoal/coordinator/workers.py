"""Workers: registration, and the record that trust is computed from. Runs inside one transaction of the store."""

from dataclasses import dataclass

from shoal.coordinator import ledger
from shoal.coordinator.rules import deliveries, trust
from shoal.coordinator.run import Run
from shoal.coordinator.store.database import Connection, Transaction
from shoal.coordinator.store.rows import find, insert, query, update
from shoal.coordinator.store.tables import DeliveringKey, WorkerRow
from shoal.errors import RefusedError
from shoal.protocol import api
from shoal.protocol.verdicts import public_reason


@dataclass(frozen=True)
class _Key:
    key: str


def find_worker(connection: Connection, key: str) -> WorkerRow | None:
    return find(connection, WorkerRow, "WHERE key=?", (key,))


def known_worker(connection: Connection, key: str) -> WorkerRow:
    """A key that has submitted something, so that it must have registered."""
    worker = find_worker(connection, key)
    assert worker is not None, "workers are never deleted"
    return worker


def require_worker(connection: Connection, key: str) -> WorkerRow:
    return admit(find_worker(connection, key))


def admit(worker: WorkerRow | None) -> WorkerRow:
    """A registered worker that is not banned; anything else is refused."""
    if worker is None:
        raise RefusedError("unknown_worker", "This key is not registered.", hint="Register first.", status=403)
    if worker.state == "banned":
        hint = "The ledger holds the verdict; the run's owner can lift a ban."
        raise RefusedError(
            "banned", f"This key is banned: {public_reason(worker.reason)}.", hint=hint, status=403, permanent=True
        )
    return worker


def register(connection: Transaction, run: Run, key: str, body: api.RegisterBody) -> None:
    _check_registration(run, key, body)
    facts = body.model_dump()
    known = find_worker(connection, key)
    if known is None:
        insert(connection, WorkerRow(key=key, registered_at=run.clock(), **facts))
    else:
        update(connection, require_worker(connection, key), **facts)
    mark_seen(connection, run, key)


def introduce(connection: Transaction, run: Run, worker: WorkerRow) -> None:
    """With the first accepted work a key enters the ledger, which strangers cannot fill, and gets budgets of its own."""
    if worker.accepted:
        return
    facts = {"worker": worker.key, "name": worker.name, "numerics_class": worker.numerics_class}
    ledger.append(connection, run.keypair, run.clock(), "registered", **facts)
    connection.on_commit(lambda: run.presence.proven.add(worker.key))


def proven_keys(connection: Connection) -> set[str]:
    """Keys with accepted work that are not banned."""
    return {
        row.key for row in query(connection, _Key, "SELECT key FROM workers WHERE accepted > 0 AND state <> 'banned'")
    }


def forget_strangers(connection: Connection, registered_before: float) -> int:
    """Removes keys that are gone and never held a lease; returns how many. Memory may keep such a row: its state says enough."""
    removed = connection.execute(
        "DELETE FROM workers WHERE state='gone' AND registered_at < ?"
        " AND NOT EXISTS (SELECT 1 FROM leases WHERE leases.worker=workers.key)",
        (registered_before,),
    )
    return removed.rowcount


def _check_registration(run: Run, key: str, body: api.RegisterBody) -> None:
    if body.numerics_class not in run.descriptor.numerics_classes:
        known = ", ".join(run.descriptor.numerics_classes)
        raise RefusedError(
            "numerics_class",
            f"This run cannot verify work of the numerics class {body.numerics_class}.",
            hint=f"It accepts {known}; the owner can admit another class by calibrating it.",
            status=422,
            permanent=True,
        )
    if run.role_keys.get(key):
        hint = "Use another key file."
        raise RefusedError("role_key", "A key of the owner's roles cannot work.", hint=hint, status=403, permanent=True)
    needed_s = run.slot_tokens / body.tokens_per_s  # a claim, but one that can only harm its own key
    if needed_s > run.config.coordinator.lease_s:
        raise RefusedError(
            "too_slow",
            f"At {body.tokens_per_s:.0f} tokens/s a slot takes up to {needed_s:.0f} s; "
            f"leases of this run last {run.config.coordinator.lease_s} s.",
            hint="Join from a faster machine, or a run with smaller slots.",
            status=422,
            permanent=True,
        )


def mark_seen(connection: Transaction, run: Run, key: str) -> WorkerRow:
    """Notes that the key is present; one that was marked as gone returns to the state that it had earned."""
    worker = require_worker(connection, key)
    connection.on_commit(lambda: run.presence.seen(key))
    return _move(connection, run, worker, "returned") if worker.state == "gone" else worker


def mark_asking(connection: Transaction, run: Run, key: str) -> WorkerRow:
    """As above, and a key that had only registered begins its probation."""
    worker = mark_seen(connection, run, key)
    connection.on_commit(lambda: run.presence.note_asking(key, has_delivered=worker.delivered_at > 0))
    return _move(connection, run, worker, "asked") if worker.state == "registered" else worker


def _move(connection: Connection, run: Run, worker: WorkerRow, event: trust.TrustEvent) -> WorkerRow:
    return save_trust(connection, worker, trust.after(trust_record(worker), event, run.config.trust))


def trust_record(worker: WorkerRow | DeliveringKey) -> trust.TrustRecord:
    return trust.TrustRecord(worker.state, worker.clean_audits, worker.anomalies)


def save_trust(connection: Connection, worker: WorkerRow, record: trust.TrustRecord) -> WorkerRow:
    return update(connection, worker, state=record.state, clean_audits=record.clean_audits, anomalies=record.anomalies)


def delivery_record(worker: WorkerRow | DeliveringKey) -> deliveries.Record:
    return deliveries.Record(
        in_time=worker.in_time,
        missed=worker.missed,
        failures=worker.failures,
        failed_at=worker.failed_at,
        work_s=worker.work_s,
        lag_s=worker.lag_s,
        tokens=worker.tokens,
        busy_s=worker.busy_s,
        slot_tokens=worker.slot_tokens,
    )


def save_deliveries(connection: Connection, worker: WorkerRow, record: deliveries.Record, **more: object) -> WorkerRow:
    return update(
        connection,
        worker,
        in_time=record.in_time,
        missed=record.missed,
        failures=record.failures,
        failed_at=record.failed_at,
        work_s=record.work_s,
        lag_s=record.lag_s,
        tokens=record.tokens,
        busy_s=record.busy_s,
        slot_tokens=record.slot_tokens,
        **more,
    )
