"""Leases: which slot a key works on, until when, and what happens to slots that are dropped.

Every function runs inside one transaction of the store. `rules.leases` decides; this module reads and writes rows.
"""

from typing import Any

from blake3 import blake3

from shoal.coordinator import slots
from shoal.coordinator.context import Context
from shoal.coordinator.rules import batches, leases
from shoal.coordinator.steps import current_step, run_state, step_counts
from shoal.coordinator.store.database import Connection, Row
from shoal.coordinator.workers import asks_for_work
from shoal.errors import RefusedError
from shoal.protocol import api
from shoal.protocol.assignment import slot_seed, step_secret

LEASES_PER_KEY = 2
"""One being worked on, one being uploaded."""
LEASE_POLLS_PER_S = 400
"""Idle workers of a large swarm ask less often, so that together they ask no more than this."""
DROPPED = ("returned", "expired", "abandoned")
PAGE = 16


def lease(connection: Connection, context: Context, key: str, body: api.LeaseBody) -> api.LeaseAnswer:
    worker = asks_for_work(connection, context, key)
    expire_leases(connection, context)
    known = connection.execute(
        "SELECT * FROM leases WHERE worker=? AND request_id=?", (key, body.request_id)
    ).fetchone()
    if known is not None:
        return api.LeaseAnswer(lease=lease_of(context, known), wanted_version=known["policy_version"])

    def refuse(reason: str, retry_after_s: float = 0.25, version: int = 0) -> api.LeaseAnswer:
        return api.LeaseAnswer(
            reason=reason,  # type: ignore[arg-type]  # one of the literals
            retry_after_s=max(retry_after_s, len(context.presence) / LEASE_POLLS_PER_S),
            wanted_version=version,
        )

    state = run_state(connection, context)
    if state != "running":
        reasons = {"finished": "finished", "paused": "paused"}
        return refuse(reasons.get(state, "draining"), retry_after_s=2.0)
    step = current_step(connection)
    if step >= context.config.run.steps:
        return refuse("no_work", retry_after_s=1.0)
    if not context.has_space():
        return refuse("disk_full", retry_after_s=5.0)
    level = context.config.training.async_level
    published = {
        row["version"]: row["manifest_digest"]
        for row in connection.execute("SELECT * FROM versions WHERE version BETWEEN ? AND ?", (step - level, step))
    }
    wanted = leases.wanted_version(list(published), step, level)
    if wanted is None:
        return refuse("waiting_for_trainer")
    version = leases.leased_version(body.held_versions, list(published), step, level)
    if version is None:
        return refuse("need_weights", version=wanted)
    if not _may_lease(connection, context, step, worker):
        return refuse("no_work", version=wanted)
    row = _grant(connection, context, worker, body.request_id, step, version, published[version])
    return api.LeaseAnswer(lease=lease_of(context, row), wanted_version=wanted)


def _may_lease(connection: Connection, context: Context, step: int, worker: Row) -> bool:
    leased = connection.execute("SELECT COUNT(*) AS n FROM leases WHERE worker=? AND state='leased'", (worker["key"],))
    if leased.fetchone()["n"] >= LEASES_PER_KEY:
        return False
    counts = step_counts(connection, context, step)
    wanted = batches.groups_wanted(counts, context.config.training)
    if wanted == 0:
        return False
    on_probation = worker["state"] != "active"
    load = _step_load(connection, context, step, counts, worker, wanted)
    return leases.may_lease(load, on_probation, context.config.trust)


def _step_load(
    connection: Connection, context: Context, step: int, counts: batches.StepCounts, worker: Row, wanted: int
) -> leases.StepLoad:
    per_slot, key = context.descriptor.rollouts.tasks_per_slot, worker["key"]
    own = {
        row["state"]: row["n"]
        for row in connection.execute(
            "SELECT state, COUNT(*) AS n FROM leases WHERE worker=? AND step=? GROUP BY state", (key, step)
        )
    }
    proven_work = has_other_workers(connection, context, key, proven=True)
    return leases.StepLoad(
        slots_of_key=sum(own.get(state, 0) for state in slots.FILLING),
        drops_of_key=sum(own.get(state, 0) for state in DROPPED),
        slots_of_probation=counts.unproven_slots,
        slots_planned=-(-(counts.judged_groups + counts.outstanding_groups + wanted) // per_slot),
        slots_outstanding=counts.outstanding_groups // per_slot,
        others_work=proven_work or has_other_workers(connection, context, key, proven=False),
        proven_work=proven_work,
    )


def has_other_workers(connection: Connection, context: Context, key: str, *, proven: bool) -> bool:
    """Whether another key of this standing that is present was granted work while a lease lasts."""
    since, looked_at = context.clock() - context.config.coordinator.lease_s, 0
    while True:
        lately = connection.execute(
            "SELECT worker FROM leases WHERE proven=? AND issued_at >= ? AND worker <> ?"
            f" ORDER BY issued_at DESC LIMIT {PAGE} OFFSET ?",
            (proven, since, key, looked_at),
        ).fetchall()
        if any(context.is_present(row["worker"]) for row in lately):
            return True
        if len(lately) < PAGE:
            return False
        looked_at += PAGE


def _grant(
    connection: Connection,
    context: Context,
    worker: Row,
    request_id: str,
    step: int,
    version: int,
    digest: str,
) -> Row:
    """A slot that others dropped, or a new one."""
    now, proven = context.clock(), worker["state"] == "active"
    seconds = leases.lease_seconds(worker["tokens_per_s"], context.slot_tokens, context.config.coordinator.lease_s)
    lease_id = lease_name(context.secret, worker["key"], request_id)
    slot = slots.open_slot(connection, step, worker["key"])
    if slot is None:
        slot = slots.take_new_slot(connection, step, lease_id, proven=proven)
    else:
        slots.take_open_slot(connection, step, slot, lease_id, proven=proven)
    row: dict[str, Any] = {
        "lease_id": lease_id,
        "request_id": request_id,
        "worker": worker["key"],
        "step": step,
        "slot": slot,
        "policy_version": version,
        "manifest_digest": digest,
        "issued_at": now,
        "expires_at": now + seconds,
        "state": "leased",
        "proven": int(proven),
    }
    connection.execute(f"INSERT INTO leases VALUES ({','.join('?' * len(row))})", tuple(row.values()))
    return row


def lease_name(secret: bytes, key: str, request_id: str) -> str:
    """One name per request, so that a repeated request means the same lease; nobody else can guess it."""
    return blake3(f"lease\n{key}\n{request_id}".encode(), key=secret).hexdigest()[:32]


def lease_of(context: Context, row: Row) -> api.Lease:
    seed = slot_seed(step_secret(context.secret, row["step"]), row["slot"])
    return api.Lease(
        lease_id=row["lease_id"],
        step=row["step"],
        slot=row["slot"],
        slot_seed=seed.hex(),
        policy_version=row["policy_version"],
        manifest_digest=row["manifest_digest"],
        expires_at=row["expires_at"],
        by_bucket=context.bucket is not None,
    )


def give_back(connection: Connection, context: Context, key: str, lease_id: str) -> None:
    row = connection.execute("SELECT * FROM leases WHERE lease_id=? AND worker=?", (lease_id, key)).fetchone()
    if row is None:
        raise RefusedError("unknown_lease", "This key holds no such lease.", status=404)
    if row["state"] == "leased":
        slots.drop_lease(connection, row, "returned")


def expire_leases(connection: Connection, context: Context) -> bool:
    late = connection.execute(
        "SELECT * FROM leases WHERE state='leased' AND expires_at < ?", (context.clock(),)
    ).fetchall()
    for row in late:
        slots.drop_lease(connection, row, "expired")
    return bool(late)
