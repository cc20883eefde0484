"""Handing out work and taking it in: leases, uploads, and what becomes of dropped slots.

Every function runs inside one transaction of the store. Decisions are made by `leases`, `batches` and `trust`; this module only
reads and writes rows.
"""

from typing import Any

from blake3 import blake3

from shoal.coordinator import slots
from shoal.coordinator.context import CLOCK_SLACK_S, Context
from shoal.coordinator.rules import batches, leases, trust
from shoal.coordinator.steps import current_step, run_state, step_counts
from shoal.coordinator.store.database import Connection, Row
from shoal.coordinator.workers import asks_for_work, require_worker, save_trust, trust_record
from shoal.errors import RefusedError
from shoal.identity import verify_signature
from shoal.protocol import api
from shoal.protocol.assignment import slot_seed, step_secret
from shoal.protocol.signing import submission_message

LEASES_PER_KEY = 2
"""One being worked on, one being uploaded."""
LEASE_POLLS_PER_S = 400
"""Idle workers of a large swarm ask less often, so that together they ask no more than this."""
LIVE_STATES = ("registered", "probation", "active", "suspect", "quarantined")
DROPPED = ("returned", "expired", "abandoned")
PAGE = 16


def lease(connection: Connection, context: Context, key: str, body: api.LeaseBody) -> api.LeaseAnswer:
    worker = asks_for_work(connection, context, key)
    expire_leases(connection, context)
    now = context.clock()
    known = connection.execute(
        "SELECT * FROM leases WHERE worker=? AND request_id=?", (key, body.request_id)
    ).fetchone()
    if known is not None:
        return api.LeaseAnswer(
            lease=lease_of(context, known),
            wanted_version=known["policy_version"],
            wanted_manifest=known["manifest_digest"],
            server_time=now,
        )

    def refuse(reason: str, retry_after_s: float = 0.25, version: int = 0, digest: str = "") -> api.LeaseAnswer:
        return api.LeaseAnswer(
            reason=reason,  # type: ignore[arg-type]  # one of the literals
            retry_after_s=max(retry_after_s, len(context.presence) / LEASE_POLLS_PER_S),
            wanted_version=version,
            wanted_manifest=digest,
            server_time=now,
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
        return refuse("need_weights", version=wanted, digest=published[wanted])
    if not _may_lease(connection, context, step, worker):
        return refuse("no_work", version=wanted, digest=published[wanted])
    row = _grant(connection, context, worker, body.request_id, step, version, published[version])
    return api.LeaseAnswer(
        lease=lease_of(context, row), wanted_version=wanted, wanted_manifest=published[wanted], server_time=now
    )


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
    proven_work = others_work(connection, context, key, proven=True)
    return leases.StepLoad(
        slots_of_key=sum(own.get(state, 0) for state in slots.FILLING),
        drops_of_key=sum(own.get(state, 0) for state in DROPPED),
        slots_of_probation=counts.unproven_slots,
        slots_planned=-(-(counts.judged_groups + counts.outstanding_groups + wanted) // per_slot),
        slots_outstanding=counts.outstanding_groups // per_slot,
        others_work=proven_work or others_work(connection, context, key, proven=False),
        proven_work=proven_work,
    )


def others_work(connection: Connection, context: Context, key: str, *, proven: bool) -> bool:
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


def verify_upload(context: Context, key: str, lease_id: str, digest: str, signature: str) -> None:
    """The worker's word for its file, which is kept as evidence."""
    verify_signature(key, submission_message(context.descriptor.run_id, lease_id, digest), signature)


def check_upload(connection: Connection, context: Context, key: str, lease_id: str, digest: str) -> Row | None:
    """The lease that this upload answers, none if the same file was taken before, or the reason why it is refused."""
    require_worker(connection, key)
    row: Row | None = connection.execute(
        "SELECT leases.*, submissions.digest AS digest FROM leases LEFT JOIN submissions USING (lease_id)"
        " WHERE leases.lease_id=? AND leases.worker=?",
        (lease_id, key),
    ).fetchone()
    if row is None:
        raise RefusedError("unknown_lease", "This key holds no such lease.", hint="Take a new lease.", status=404)
    if row["digest"] == digest:
        return None
    if row["digest"] is not None:
        raise RefusedError("already_submitted", "Another file was submitted for this lease.", status=409)
    if row["state"] != "leased" or row["expires_at"] < context.clock():
        raise RefusedError("lease_expired", "The lease ended before the upload.", hint="Take a new lease.", status=409)
    return row


def accept_upload(
    connection: Connection,
    context: Context,
    key: str,
    lease_id: str,
    submission_id: str,
    digest: str,
    size_bytes: int,
    signature: str,
) -> api.SubmissionAnswer:
    """Takes in a file whose signature was verified."""
    row = check_upload(connection, context, key, lease_id, digest)
    if row is None:
        known = connection.execute("SELECT * FROM submissions WHERE lease_id=?", (lease_id,)).fetchone()
        return api.SubmissionAnswer(submission_id=known["submission_id"], state=known["state"])
    worker = require_worker(connection, key)
    rate, step = trust.audit_rate(trust_record(worker), context.config.trust), current_step(connection)
    connection.execute(
        "INSERT INTO submissions (submission_id, lease_id, worker, digest, size_bytes, signature, received_at, audit,"
        " audit_step, audit_rate, numerics_class, state) VALUES (?,?,?,?,?,?,?,?,?,?,?,'pending')",
        (
            submission_id,
            lease_id,
            key,
            digest,
            size_bytes,
            signature,
            context.clock(),
            int(trust.is_audited(step_secret(context.secret, step), digest, rate)),
            step,
            rate,
            worker["numerics_class"],
        ),
    )
    connection.execute("UPDATE leases SET state='submitted' WHERE lease_id=?", (lease_id,))
    slots.move_slot(connection, row, "submitted")
    context.seen(key)
    return api.SubmissionAnswer(submission_id=submission_id, state="pending")


def expire_leases(connection: Connection, context: Context) -> bool:
    late = connection.execute(
        "SELECT * FROM leases WHERE state='leased' AND expires_at < ?", (context.clock(),)
    ).fetchall()
    for row in late:
        slots.drop_lease(connection, row, "expired")
    return bool(late)


def sweep(connection: Connection, context: Context) -> bool:
    """Ends leases that ran out, gives up workers that fell silent, forgets old nonces; true if work came free."""
    expired = expire_leases(connection, context)
    given_up = [key for key in context.silent() if _give_up(connection, context, key)]
    _forget_nonces(connection, context)
    return expired or bool(given_up)


def _forget_nonces(connection: Connection, context: Context) -> None:
    """Those whose request no process would accept any more."""
    now = context.clock()
    oldest = now - context.config.coordinator.clock_window_s - (CLOCK_SLACK_S if context.is_shared else 0.0)
    connection.execute("DELETE FROM nonces WHERE at < ?", (oldest,))
    connection.execute("DELETE FROM old_nonces WHERE expires_at < ?", (now,))


def _give_up(connection: Connection, context: Context, key: str) -> bool:
    """Marks a silent key as gone. It is forgotten one sweep later, when that is surely on disk."""
    worker = connection.execute("SELECT * FROM workers WHERE key=?", (key,)).fetchone()
    if worker is None or worker["state"] not in LIVE_STATES:
        context.forget(key)
        return False
    save_trust(connection, key, trust.after(trust_record(worker), "silent", context.config.trust))
    for row in connection.execute("SELECT * FROM leases WHERE worker=? AND state='leased'", (key,)).fetchall():
        slots.drop_lease(connection, row, "abandoned")
    return True
