"""From submission to batch: claims of validators, verdicts and what follows from them, batches, versions.

A verdict and all its consequences (credit, trust, ban, withdrawal, the batch that it completes) are one transaction.
"""

import json
import sqlite3
import uuid
from collections.abc import Callable, Sequence

from shoal.coordinator import batches, ledger, trust
from shoal.coordinator.assignments import (
    current_step,
    drop_lease,
    lease_of,
    newest_version,
    run_state,
    save_trust,
    step_view,
    trust_record,
)
from shoal.coordinator.context import Context
from shoal.errors import RefusedError
from shoal.files import digest_bytes
from shoal.protocol import api
from shoal.protocol.assignment import step_secret
from shoal.protocol.verdicts import Weight, heaviest


def claim(connection: sqlite3.Connection, context: Context, key: str, body: api.ClaimBody) -> api.ClaimAnswer:
    """The oldest submission that nobody judges; the same one again for a repeated request."""
    context.require_role(key, "validator")
    now = context.clock()
    release_claims(connection, context)
    row = connection.execute(
        "SELECT * FROM submissions WHERE state='claimed' AND claimed_by=? AND claim_request=?", (key, body.request_id)
    ).fetchone()
    if row is None:
        row = connection.execute(
            "SELECT * FROM submissions WHERE state='pending' ORDER BY received_at LIMIT 1"
        ).fetchone()
        if row is None:
            return api.ClaimAnswer(run_state=run_state(connection, context))
        connection.execute(
            "UPDATE submissions SET state='claimed', claim_id=?, claimed_by=?, claim_request=?, claim_expires=?, tries=tries+1"
            " WHERE submission_id=?",
            (uuid.uuid4().hex, key, body.request_id, now + context.config.validation.claim_s, row["submission_id"]),
        )
    row = connection.execute("SELECT * FROM submissions WHERE submission_id=?", (row["submission_id"],)).fetchone()
    lease = connection.execute("SELECT * FROM leases WHERE lease_id=?", (row["lease_id"],)).fetchone()
    claimed = api.Claim(
        claim_id=row["claim_id"],
        submission_id=row["submission_id"],
        worker_key=row["worker"],
        digest=row["digest"],
        lease=lease_of(context, lease),
        audit=bool(row["audit"]),
    )
    return api.ClaimAnswer(claim=claimed, run_state=run_state(connection, context))


def claim_operation(context: Context, key: str, body: api.ClaimBody) -> Callable[[sqlite3.Connection], api.ClaimAnswer]:
    return lambda connection: claim(connection, context, key, body)


def release_claims(connection: sqlite3.Connection, context: Context) -> bool:
    """Claims of validators that died return; a file that nobody survives is set aside without blame."""
    lost = connection.execute(
        "SELECT * FROM submissions WHERE state='claimed' AND claim_expires < ?", (context.clock(),)
    ).fetchall()
    for row in lost:
        _try_again(connection, context, row, "no verdict before the claim ran out")
    return bool(lost)


def record_verdict(connection: sqlite3.Connection, context: Context, key: str, body: api.VerdictBody) -> bool:
    """Applies a verdict once; false if the claim had passed to somebody else."""
    context.require_role(key, "validator")
    row = connection.execute("SELECT * FROM submissions WHERE submission_id=?", (body.submission_id,)).fetchone()
    if row is None:
        raise RefusedError("unknown_submission", "There is no such submission.", status=404)
    if row["state"] != "claimed" or row["claim_id"] != body.claim_id:
        return bool(row["state"] == "judged" and row["claim_id"] == body.claim_id)
    if body.accepted:
        _accept(connection, context, row, body)
    elif heaviest(list(body.reasons)) in (Weight.FAULT, None):
        _try_again(connection, context, row, body.detail or ", ".join(body.reasons))
    else:
        _reject(connection, context, row, body)
    advance(connection, context)
    return True


def _close(
    connection: sqlite3.Connection, context: Context, row: sqlite3.Row, body: api.VerdictBody, slot_state: str
) -> sqlite3.Row:
    """Files the verdict and settles the slot; returns the lease."""
    now, verdict = context.clock(), body.model_dump_json()
    connection.execute(
        "UPDATE submissions SET state='judged', judged_at=?, verdict=? WHERE submission_id=?",
        (now, verdict, row["submission_id"]),
    )
    lease: sqlite3.Row = connection.execute("SELECT * FROM leases WHERE lease_id=?", (row["lease_id"],)).fetchone()
    connection.execute(
        "UPDATE slots SET state=? WHERE step=? AND slot=? AND lease_id=?",
        (slot_state, lease["step"], lease["slot"], lease["lease_id"]),
    )
    ledger.append(
        connection,
        context.keypair,
        now,
        "verdict",
        worker=row["worker"],
        step=lease["step"],
        slot=lease["slot"],
        file=row["digest"],
        accepted=body.accepted,
        verdict=digest_bytes(verdict.encode()),
    )
    return lease


def _accept(connection: sqlite3.Connection, context: Context, row: sqlite3.Row, body: api.VerdictBody) -> None:
    lease = _close(connection, context, row, body, "resolved")
    worker = connection.execute("SELECT * FROM workers WHERE key=?", (row["worker"],)).fetchone()
    record = trust_record(worker)
    usable = record.state not in ("quarantined", "banned")
    for group in body.groups:
        state = "withheld" if not usable else "accepted" if group.useful else "no_signal"
        connection.execute(
            "INSERT INTO groups (group_id, submission_id, worker, step, slot, number, policy_version, useful, tokens, rewards,"
            " task_rewards, logprobs_verified, state) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)",
            (
                f"{lease['step']}/{lease['slot']}/{group.group}",
                row["submission_id"],
                row["worker"],
                lease["step"],
                lease["slot"],
                group.group,
                lease["policy_version"],
                group.useful,
                group.tokens,
                json.dumps(group.rewards),
                json.dumps(group.task_rewards),
                body.logprobs_verified,
                state,
            ),
        )
    save_trust(
        connection,
        row["worker"],
        trust.after(record, "clean_audit" if body.audited else "clean_pass", context.config.trust),
    )
    earned = sum(group.tokens for group in body.groups) if usable else 0
    held, released = trust.split_credit(worker["credit_held"], earned, context.config.trust.stake_tokens)
    connection.execute(
        "UPDATE workers SET accepted=accepted+1, credit_held=credit_held+?, credit_released=credit_released+? WHERE key=?",
        (held, released, row["worker"]),
    )
    ledger.append(
        connection,
        context.keypair,
        context.clock(),
        "credit",
        worker=row["worker"],
        held=held,
        released=released,
        submission=row["submission_id"],
    )


def _reject(connection: sqlite3.Connection, context: Context, row: sqlite3.Row, body: api.VerdictBody) -> None:
    _close(connection, context, row, body, "open")
    connection.execute("UPDATE workers SET rejected=rejected+1 WHERE key=?", (row["worker"],))
    worker = connection.execute("SELECT * FROM workers WHERE key=?", (row["worker"],)).fetchone()
    event: trust.TrustEvent = "proof" if heaviest(list(body.reasons)) is Weight.PROOF else "anomaly"
    record = trust.after(trust_record(worker), event, context.config.trust)
    if record.state == "banned" and worker["state"] != "banned":
        ban(connection, context, row["worker"], f"{', '.join(body.reasons)}: {body.detail}")
    else:
        save_trust(connection, row["worker"], record)


def ban(connection: sqlite3.Connection, context: Context, key: str, reason: str) -> None:
    """Bans a key for good: stake slashed, unconsumed groups withdrawn, pending work void, leases opened to others."""
    now = context.clock()
    worker = connection.execute("SELECT * FROM workers WHERE key=?", (key,)).fetchone()
    connection.execute(
        "UPDATE workers SET state='banned', reason=?, banned_at=?, credit_held=0 WHERE key=?", (reason, now, key)
    )
    held = worker["credit_held"]
    ledger.append(connection, context.keypair, now, "slash", worker=key, held=-held, slashed=held)
    ledger.append(connection, context.keypair, now, "ban", worker=key, reason=reason)
    withdraw(connection, key)


def withdraw(connection: sqlite3.Connection, key: str) -> None:
    connection.execute("UPDATE groups SET state='withdrawn' WHERE worker=? AND state='accepted'", (key,))
    connection.execute("UPDATE submissions SET state='void' WHERE worker=? AND state IN ('pending','claimed')", (key,))
    for lease in connection.execute(
        "SELECT * FROM leases WHERE worker=? AND state IN ('leased','submitted')", (key,)
    ).fetchall():
        slot = connection.execute("SELECT state FROM slots WHERE lease_id=?", (lease["lease_id"],)).fetchone()
        if slot is not None and slot["state"] in ("leased", "submitted"):
            drop_lease(connection, lease, "void")


def _try_again(connection: sqlite3.Connection, context: Context, row: sqlite3.Row, why: str) -> None:
    if row["tries"] < context.config.validation.max_tries:
        connection.execute(
            "UPDATE submissions SET state='pending', claim_id=NULL WHERE submission_id=?", (row["submission_id"],)
        )
        return
    connection.execute(
        "UPDATE submissions SET state='set_aside', judged_at=?, verdict=? WHERE submission_id=?",
        (context.clock(), json.dumps({"detail": why}), row["submission_id"]),
    )
    lease = connection.execute("SELECT * FROM leases WHERE lease_id=?", (row["lease_id"],)).fetchone()
    drop_lease(connection, lease, "set_aside")
    ledger.append(
        connection, context.keypair, context.clock(), "set_aside", submission=row["submission_id"], why=why[:500]
    )


def advance(connection: sqlite3.Connection, context: Context) -> bool:
    """Forms the batch of the current step if it is complete; expires groups that no batch may hold any more."""
    step = current_step(connection)
    if step >= context.config.run.steps:
        return False
    view = step_view(connection, context, step)
    decision = batches.decide(view, context.config.training)
    _mark(connection, decision.expired, "expired")
    if decision.batch is None:
        return False
    for position, group_id in enumerate(decision.batch):
        connection.execute(
            "UPDATE groups SET state='consumed', batch_step=?, position=? WHERE group_id=?", (step, position, group_id)
        )
    dropped = _dropped_counts(connection, step, len(decision.expired))
    now = context.clock()
    connection.execute(
        "INSERT INTO batches VALUES (?,?,?,?,?)",
        (step, now, len(decision.batch), view.judged_groups, json.dumps(dropped)),
    )
    connection.execute("UPDATE slots SET state='closed' WHERE step=? AND state='open'", (step,))
    ledger.append(
        connection,
        context.keypair,
        now,
        "batch",
        step=step,
        groups=list(decision.batch),
        step_secret=step_secret(context.secret, step).hex(),
    )
    return True


def _mark(connection: sqlite3.Connection, group_ids: Sequence[str], state: str) -> None:
    connection.executemany("UPDATE groups SET state=? WHERE group_id=?", [(state, group_id) for group_id in group_ids])


def _dropped_counts(connection: sqlite3.Connection, step: int, expired: int) -> dict[str, int]:
    rows = connection.execute(
        "SELECT state, COUNT(*) AS n FROM groups WHERE step=? AND state NOT IN ('consumed') GROUP BY state", (step,)
    )
    names = {"accepted": "carried_over"}
    counts = {names.get(row["state"], row["state"]): int(row["n"]) for row in rows}
    if expired:
        counts["expired"] = expired
    return counts


def batch_record(connection: sqlite3.Connection, context: Context, step: int) -> api.BatchAnswer:
    row = connection.execute("SELECT * FROM batches WHERE step=?", (step,)).fetchone()
    if row is None:
        return api.BatchAnswer(waiting_for=_missing(connection, context, step))
    groups = connection.execute(
        "SELECT groups.*, submissions.digest AS digest FROM groups JOIN submissions USING (submission_id)"
        " WHERE batch_step=? ORDER BY position",
        (step,),
    )
    record = api.BatchRecord(
        step=step,
        groups=[
            api.BatchGroup(
                group_id=group["group_id"],
                submission_id=group["submission_id"],
                digest=group["digest"],
                group=group["number"],
                policy_version=group["policy_version"],
                rewards=json.loads(group["rewards"]),
                task_rewards=json.loads(group["task_rewards"]),
                logprobs_verified=bool(group["logprobs_verified"]),
            )
            for group in groups
        ],
        dropped=json.loads(row["dropped"]),
        generated_groups=row["generated"],
        formed_at=row["formed_at"],
    )
    return api.BatchAnswer(batch=record)


def _missing(connection: sqlite3.Connection, context: Context, step: int) -> str:
    view = step_view(connection, context, step)
    useful = sum(group.useful for group in view.waiting)
    workers = sum(
        context.is_present(row["key"]) for row in connection.execute("SELECT key FROM workers WHERE state!='banned'")
    )
    return (
        f"{useful} of {context.config.training.groups_per_step} useful groups of step {step}"
        f" ({view.outstanding_groups} on their way, {workers} workers present)"
    )


def publish(connection: sqlite3.Connection, context: Context, key: str, body: api.VersionBody) -> str:
    """Records a version once; a number never gets other bytes. Returns the ledger head that the signed head must carry."""
    context.require_role(key, "trainer")
    known = connection.execute("SELECT * FROM versions WHERE version=?", (body.version,)).fetchone()
    if known is not None:
        if known["weights_digest"] != body.weights_digest:
            raise RefusedError(
                "version_conflict", f"Version {body.version} was published with other weights.", status=409
            )
        return ledger.head(connection)[1]
    expected = newest_version(connection) + 1
    if body.version != expected or body.version > current_step(connection):
        raise RefusedError("version_order", f"Version {expected} is the next one, not {body.version}.", status=409)
    now = context.clock()
    connection.execute(
        "INSERT INTO versions VALUES (?,?,?,?,?,?)",
        (body.version, body.manifest_digest, body.weights_digest, body.bytes_total, now, json.dumps(body.report)),
    )
    return ledger.append(
        connection,
        context.keypair,
        now,
        "version",
        version=body.version,
        manifest=body.manifest_digest,
        weights=body.weights_digest,
    )


def record_evaluation(connection: sqlite3.Connection, context: Context, key: str, body: api.EvaluationBody) -> None:
    context.require_role(key, "evaluator")
    connection.execute(
        "INSERT INTO evaluations VALUES (?,?,?) ON CONFLICT (version) DO NOTHING",
        (body.version, context.clock(), body.model_dump_json()),
    )
