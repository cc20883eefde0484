"""Handing out work and taking it in: registration, leases, uploads, and what becomes of dropped slots.

Every function runs inside one transaction of the store. Decisions are made by `leases`, `batches` and `trust`; this module only
reads and writes rows.
"""

import sqlite3
import uuid

from shoal.config import TrustConfig
from shoal.coordinator import batches, leases, ledger, trust
from shoal.coordinator.context import Context
from shoal.errors import RefusedError
from shoal.identity import verify_signature
from shoal.protocol import api
from shoal.protocol.assignment import slot_seed, step_secret
from shoal.protocol.signing import submission_message

LEASES_PER_KEY = 2
"""One being worked on, one being uploaded."""


def current_step(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT MAX(step) AS last FROM batches").fetchone()
    return 0 if row["last"] is None else int(row["last"]) + 1


def newest_version(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT MAX(version) AS newest FROM versions").fetchone()
    return -1 if row["newest"] is None else int(row["newest"])


def run_state(connection: sqlite3.Connection, context: Context) -> str:
    if newest_version(connection) >= context.config.run.steps:
        return "finished"
    row = connection.execute("SELECT value FROM meta WHERE name='run_state'").fetchone()
    return str(row["value"]) if row else "running"


def trust_record(row: sqlite3.Row) -> trust.TrustRecord:
    return trust.TrustRecord(row["state"], row["clean_audits"], row["anomalies"])


def save_trust(connection: sqlite3.Connection, key: str, record: trust.TrustRecord) -> None:
    connection.execute(
        "UPDATE workers SET state=?, clean_audits=?, anomalies=? WHERE key=?",
        (record.state, record.clean_audits, record.anomalies, key),
    )


def require_worker(connection: sqlite3.Connection, key: str) -> sqlite3.Row:
    row: sqlite3.Row | None = connection.execute("SELECT * FROM workers WHERE key=?", (key,)).fetchone()
    if row is None:
        raise RefusedError("unknown_worker", "This key is not registered.", hint="Register first.", status=403)
    if row["state"] == "banned":
        hint = "The ledger holds the verdict; the run's owner can lift a ban."
        raise RefusedError("banned", f"This key is banned: {row['reason']}.", hint=hint, status=403)
    return row


def register(connection: sqlite3.Connection, context: Context, key: str, body: api.RegisterBody) -> None:
    if body.numerics_class not in context.descriptor.numerics_classes:
        known = ", ".join(context.descriptor.numerics_classes)
        raise RefusedError(
            "numerics_class",
            f"This run cannot judge work of the numerics class {body.numerics_class}.",
            hint=f"It accepts {known}; the owner can admit another class by calibrating it.",
            status=422,
        )
    if context.role_keys.get(key):
        raise RefusedError(
            "role_key", "A key of the owner's roles cannot work.", hint="Use another key file.", status=403
        )
    now = context.clock()
    row = connection.execute("SELECT * FROM workers WHERE key=?", (key,)).fetchone()
    if row is None:
        connection.execute(
            "INSERT INTO workers (key, name, engine, numerics_class, tokens_per_s, registered_at, state)"
            " VALUES (?,?,?,?,?,?,'probation')",
            (key, body.name, body.engine, body.numerics_class, body.tokens_per_s, now),
        )
        ledger.append(connection, context.keypair, now, "registered", worker=key, numerics_class=body.numerics_class)
    else:
        require_worker(connection, key)
        connection.execute(
            "UPDATE workers SET name=?, engine=?, numerics_class=?, tokens_per_s=? WHERE key=?",
            (body.name, body.engine, body.numerics_class, body.tokens_per_s, key),
        )
    welcome_back(connection, context, key)


def welcome_back(connection: sqlite3.Connection, context: Context, key: str) -> None:
    """Notes that the key lives; one that was given up returns to the state that it had earned."""
    row = require_worker(connection, key)
    context.seen(key)
    if row["state"] == "gone":
        save_trust(connection, key, trust.after(trust_record(row), "returned", context.config.trust))


def lease(connection: sqlite3.Connection, context: Context, key: str, body: api.LeaseBody) -> api.LeaseAnswer:
    worker = require_worker(connection, key)
    welcome_back(connection, context, key)
    sweep(connection, context)
    now = context.clock()
    known = connection.execute(
        "SELECT * FROM leases WHERE worker=? AND request_id=?", (key, body.request_id)
    ).fetchone()
    if known is not None:
        return api.LeaseAnswer(lease=lease_of(context, known), server_time=now)

    def refuse(reason: str, retry_after_s: float = 0.25, version: int = 0, digest: str = "") -> api.LeaseAnswer:
        return api.LeaseAnswer(
            reason=reason,  # type: ignore[arg-type]  # one of the literals
            retry_after_s=retry_after_s,
            wanted_version=version,
            wanted_manifest=digest,
            server_time=now,
        )

    state = run_state(connection, context)
    if state != "running":
        return refuse("finished" if state == "finished" else "paused", retry_after_s=2.0)
    step = current_step(connection)
    if step >= context.config.run.steps:
        return refuse("no_work", retry_after_s=1.0)
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
    slot = _pick_slot(connection, context, step, worker)
    if slot is None:
        return refuse("no_work", version=wanted, digest=published[wanted])
    row = _grant(connection, context, worker, body.request_id, step, slot, version, published[version])
    return api.LeaseAnswer(
        lease=lease_of(context, row), wanted_version=wanted, wanted_manifest=published[wanted], server_time=now
    )


def _pick_slot(connection: sqlite3.Connection, context: Context, step: int, worker: sqlite3.Row) -> int | None:
    key = worker["key"]
    held = connection.execute("SELECT COUNT(*) AS n FROM leases WHERE worker=? AND state='leased'", (key,)).fetchone()[
        "n"
    ]
    if held >= LEASES_PER_KEY:
        return None
    view = step_view(connection, context, step)
    decision = batches.decide(view, context.config.training)
    load = _step_load(connection, context, step, key, view, decision.groups_wanted)
    if not leases.may_lease(load, worker["state"] != "active", context.config.trust):
        return None
    dropped = connection.execute(
        "SELECT slot FROM slots WHERE state='open' AND step=? AND NOT EXISTS (SELECT 1 FROM leases"
        " WHERE leases.step=slots.step AND leases.slot=slots.slot AND leases.worker=?) ORDER BY slot LIMIT 1",
        (step, key),
    ).fetchone()
    if dropped is not None:
        return int(dropped["slot"])
    if decision.groups_wanted == 0:
        return None
    last = connection.execute("SELECT MAX(slot) AS last FROM slots WHERE step=?", (step,)).fetchone()["last"]
    slot = 0 if last is None else int(last) + 1
    connection.execute("INSERT INTO slots (step, slot, state) VALUES (?,?,'open')", (step, slot))
    return slot


def _step_load(
    connection: sqlite3.Connection, context: Context, step: int, key: str, view: batches.StepView, wanted: int
) -> leases.StepLoad:
    rows = connection.execute(
        "SELECT leases.worker AS worker, workers.state AS state, COUNT(*) AS n FROM leases JOIN workers"
        " ON workers.key = leases.worker WHERE leases.step=? AND leases.state IN ('leased','submitted')"
        " GROUP BY leases.worker",
        (step,),
    ).fetchall()
    live = [
        row
        for row in connection.execute("SELECT key, state FROM workers WHERE state NOT IN ('gone','banned')")
        if context.is_present(row["key"])
    ]
    per_slot = context.descriptor.rollouts.tasks_per_slot
    groups = view.judged_groups + view.outstanding_groups + wanted
    return leases.StepLoad(
        slots_of_key=sum(row["n"] for row in rows if row["worker"] == key),
        slots_of_probation=sum(row["n"] for row in rows if row["state"] != "active"),
        slots_planned=-(-groups // per_slot),
        other_keys=sum(row["key"] != key for row in live),
        proven_keys=sum(row["state"] == "active" for row in live),
    )


def _grant(
    connection: sqlite3.Connection,
    context: Context,
    worker: sqlite3.Row,
    request_id: str,
    step: int,
    slot: int,
    version: int,
    digest: str,
) -> sqlite3.Row:
    now = context.clock()
    seconds = leases.lease_seconds(worker["tokens_per_s"], context.slot_tokens, context.config.coordinator.lease_s)
    lease_id = uuid.uuid4().hex
    connection.execute(
        "INSERT INTO leases VALUES (?,?,?,?,?,?,?,?,?,'leased')",
        (lease_id, request_id, worker["key"], step, slot, version, digest, now, now + seconds),
    )
    connection.execute(
        "UPDATE slots SET state='leased', lease_id=?, attempts=attempts+1 WHERE step=? AND slot=?",
        (lease_id, step, slot),
    )
    row: sqlite3.Row = connection.execute("SELECT * FROM leases WHERE lease_id=?", (lease_id,)).fetchone()
    return row


def lease_of(context: Context, row: sqlite3.Row) -> api.Lease:
    seed = slot_seed(step_secret(context.secret, row["step"]), row["slot"])
    return api.Lease(
        lease_id=row["lease_id"],
        step=row["step"],
        slot=row["slot"],
        slot_seed=seed.hex(),
        policy_version=row["policy_version"],
        manifest_digest=row["manifest_digest"],
        expires_at=row["expires_at"],
    )


def step_view(connection: sqlite3.Connection, context: Context, step: int) -> batches.StepView:
    waiting = [
        batches.GroupView(
            row["step"], row["slot"], row["number"], row["group_id"], row["policy_version"], bool(row["useful"])
        )
        for row in connection.execute("SELECT * FROM groups WHERE state='accepted'")
    ]
    active = connection.execute(
        "SELECT slot, attempts FROM slots WHERE step=? AND state IN ('leased','submitted')", (step,)
    ).fetchall()
    judged = connection.execute(
        "SELECT COUNT(*) AS n FROM slots WHERE step=? AND state='resolved'", (step,)
    ).fetchone()["n"]
    per_slot = context.descriptor.rollouts.tasks_per_slot
    return batches.StepView(
        step=step,
        waiting=waiting,
        blocking_slots=[row["slot"] for row in active if row["attempts"] == 1],
        outstanding_groups=len(active) * per_slot,
        judged_groups=judged * per_slot,
    )


def give_back(connection: sqlite3.Connection, context: Context, key: str, lease_id: str) -> None:
    row = connection.execute("SELECT * FROM leases WHERE lease_id=? AND worker=?", (lease_id, key)).fetchone()
    if row is None:
        raise RefusedError("unknown_lease", "This key holds no such lease.", status=404)
    if row["state"] == "leased":
        drop_lease(connection, row, "returned")


def drop_lease(connection: sqlite3.Connection, row: sqlite3.Row, state: str) -> None:
    """Ends a lease; its slot opens for a different key."""
    connection.execute("UPDATE leases SET state=? WHERE lease_id=?", (state, row["lease_id"]))
    connection.execute(
        "UPDATE slots SET state='open', lease_id=NULL WHERE step=? AND slot=? AND lease_id=?",
        (row["step"], row["slot"], row["lease_id"]),
    )


def check_upload(
    connection: sqlite3.Connection, context: Context, key: str, lease_id: str, digest: str, signature: str
) -> sqlite3.Row:
    """The lease that this upload answers, or the reason why it is refused."""
    require_worker(connection, key)
    row: sqlite3.Row | None = connection.execute(
        "SELECT * FROM leases WHERE lease_id=? AND worker=?", (lease_id, key)
    ).fetchone()
    if row is None:
        raise RefusedError("unknown_lease", "This key holds no such lease.", hint="Take a new lease.", status=404)
    if row["state"] not in ("leased", "submitted") or (
        row["state"] == "leased" and row["expires_at"] < context.clock()
    ):
        raise RefusedError("lease_expired", "The lease ended before the upload.", hint="Take a new lease.", status=409)
    verify_signature(key, submission_message(context.descriptor.run_id, lease_id, digest), signature)
    return row


def accept_upload(
    connection: sqlite3.Connection,
    context: Context,
    key: str,
    lease_id: str,
    submission_id: str,
    digest: str,
    size_bytes: int,
    signature: str,
) -> api.SubmissionAnswer:
    row = check_upload(connection, context, key, lease_id, digest, signature)
    known = connection.execute("SELECT * FROM submissions WHERE lease_id=?", (lease_id,)).fetchone()
    if known is not None:
        if known["digest"] != digest:
            raise RefusedError("already_submitted", "Another file was submitted for this lease.", status=409)
        return api.SubmissionAnswer(submission_id=known["submission_id"], state=known["state"])
    worker = require_worker(connection, key)
    rate = trust.audit_rate(trust_record(worker), context.config.trust)
    connection.execute(
        "INSERT INTO submissions (submission_id, lease_id, worker, digest, size_bytes, signature, received_at, audit, state)"
        " VALUES (?,?,?,?,?,?,?,?,'pending')",
        (
            submission_id,
            lease_id,
            key,
            digest,
            size_bytes,
            signature,
            context.clock(),
            trust.is_audited(context.secret, digest, rate),
        ),
    )
    connection.execute("UPDATE leases SET state='submitted' WHERE lease_id=?", (lease_id,))
    connection.execute("UPDATE slots SET state='submitted' WHERE step=? AND slot=?", (row["step"], row["slot"]))
    context.seen(key)
    return api.SubmissionAnswer(submission_id=submission_id, state="pending")


def sweep(connection: sqlite3.Connection, context: Context) -> bool:
    """Ends leases that ran out and gives up workers that fell silent; true if anything changed."""
    now = context.clock()
    late = connection.execute("SELECT * FROM leases WHERE state='leased' AND expires_at < ?", (now,)).fetchall()
    for row in late:
        drop_lease(connection, row, "expired")
    silent = [
        row
        for row in connection.execute("SELECT * FROM workers WHERE state NOT IN ('gone','banned')").fetchall()
        if not context.is_present(row["key"])
    ]
    for row in silent:
        _give_up(connection, row, context.config.trust)
    connection.execute("DELETE FROM nonces WHERE expires_at < ?", (now,))
    return bool(late or silent)


def _give_up(connection: sqlite3.Connection, worker: sqlite3.Row, config: TrustConfig) -> None:
    save_trust(connection, worker["key"], trust.after(trust_record(worker), "silent", config))
    for row in connection.execute(
        "SELECT * FROM leases WHERE worker=? AND state='leased'", (worker["key"],)
    ).fetchall():
        drop_lease(connection, row, "abandoned")
