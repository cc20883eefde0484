"""Verdicts and what follows from them: credit, trust, drift, bans, withdrawn groups, and the batch that a verdict completes.

A verdict and all its consequences are one transaction.
"""

import json

from shoal.coordinator import ledger, slots
from shoal.coordinator import task_stats as tasks
from shoal.coordinator.context import Context
from shoal.coordinator.rules import drift, trust
from shoal.coordinator.steps import advance, current_step
from shoal.coordinator.store.database import Connection, Row
from shoal.coordinator.submissions import try_again
from shoal.coordinator.workers import save_trust, trust_record
from shoal.errors import RefusedError
from shoal.files import digest_bytes
from shoal.protocol import api
from shoal.protocol.verdicts import Reason, Severity, most_severe


def record_verdict(connection: Connection, context: Context, key: str, body: api.VerdictBody) -> bool:
    """Applies a verdict once, and says so again when asked again; false if the claim had run out."""
    context.require_role(key, "validator")
    row = connection.execute("SELECT * FROM submissions WHERE submission_id=?", (body.submission_id,)).fetchone()
    if row is None:
        raise RefusedError("unknown_submission", "There is no such submission.", status=404)
    if row["claim_id"] != body.claim_id or row["state"] == "void":
        return False
    if row["state"] != "claimed":
        return True
    if body.accepted:
        _accept(connection, context, row, body)
    elif most_severe(list(body.reasons)) in (Severity.FAULT, None):
        try_again(connection, context, row, body.reasons, body.detail or ", ".join(body.reasons))
    else:
        _reject(connection, context, row, body)
    if body.audited:
        _weigh_drift(connection, context, row["worker"], body)
    advance(connection, context)
    return True


def _close(connection: Connection, context: Context, row: Row, body: api.VerdictBody, slot_state: str) -> Row:
    """Files the verdict and settles the slot; returns the lease."""
    now, verdict = context.clock(), body.model_dump_json()
    connection.execute(
        "UPDATE submissions SET state='judged', judged_at=?, verdict=? WHERE submission_id=?",
        (now, verdict, row["submission_id"]),
    )
    lease: Row = connection.execute("SELECT * FROM leases WHERE lease_id=?", (row["lease_id"],)).fetchone()
    slots.move_slot(connection, lease, slot_state)
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
        audit_drawn=bool(row["audit"]),
        audit_rate=row["audit_rate"],
        audit_step=row["audit_step"],
        verdict=digest_bytes(verdict.encode()),
    )
    return lease


def _accept(connection: Connection, context: Context, row: Row, body: api.VerdictBody) -> None:
    worker = connection.execute("SELECT * FROM workers WHERE key=?", (row["worker"],)).fetchone()
    record = trust_record(worker)
    usable = trust.is_usable(record, context.config.trust)
    # What a quarantined key made is judged but not used: its slot goes to another key.
    lease = _close(connection, context, row, body, "resolved" if usable else "open")
    for group in body.groups if usable else []:
        tasks.count_group(connection, group)
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
                "accepted" if group.useful else "no_signal",
            ),
        )
    useful = sum(group.useful for group in body.groups) if usable else 0
    if useful:
        slots.count_waiting(connection, lease["step"], lease["policy_version"], useful)
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


def _reject(connection: Connection, context: Context, row: Row, body: api.VerdictBody) -> None:
    _close(connection, context, row, body, "open")
    connection.execute("UPDATE workers SET rejected=rejected+1 WHERE key=?", (row["worker"],))
    worker = connection.execute("SELECT * FROM workers WHERE key=?", (row["worker"],)).fetchone()
    event: trust.TrustEvent = "proof" if most_severe(list(body.reasons)) is Severity.PROOF else "anomaly"
    record = trust.after(trust_record(worker), event, context.config.trust)
    if record.state == "banned" and worker["state"] != "banned":
        ban(connection, context, row["worker"], f"{', '.join(body.reasons)}: {body.detail}")
    else:
        save_trust(connection, row["worker"], record)


def _weigh_drift(connection: Connection, context: Context, key: str, body: api.VerdictBody) -> None:
    """What no single audit can tell: deviations too small for a verdict ban a key once they have added up."""
    worker = connection.execute("SELECT * FROM workers WHERE key=?", (key,)).fetchone()
    if worker["state"] == "banned":
        return
    now = drift.after(worker["drift"], body.metrics.drift_llr)
    connection.execute("UPDATE workers SET drift=? WHERE key=?", (now, key))
    if drift.level(now) == "cheating":
        ban(
            connection,
            context,
            key,
            f"{Reason.SAMPLING_DRIFT}: lost near-ties add up to e^{now:.1f} against honest work",
        )
    elif drift.became_suspicious(worker["drift"], now):
        save_trust(connection, key, trust.after(trust_record(worker), "anomaly", context.config.trust))


def ban(connection: Connection, context: Context, key: str, reason: str) -> None:
    """Bans a key for good: stake slashed, unconsumed groups withdrawn, pending work void, leases opened to others."""
    now = context.clock()
    worker = connection.execute("SELECT * FROM workers WHERE key=?", (key,)).fetchone()
    connection.execute(
        "UPDATE workers SET state='banned', reason=?, banned_at=?, credit_held=0 WHERE key=?", (reason, now, key)
    )
    held = worker["credit_held"]
    ledger.append(connection, context.keypair, now, "slash", worker=key, held=-held, slashed=held)
    ledger.append(connection, context.keypair, now, "ban", worker=key, reason=reason)
    context.forget(key)
    withdraw(connection, key)


def withdraw(connection: Connection, key: str) -> None:
    """Takes back what no batch holds; slots of the current step count as never done, so that others fill the gap."""
    slots.mark_groups(connection, "worker=?", (key,), "withdrawn")
    connection.execute("UPDATE submissions SET state='void' WHERE worker=? AND state IN ('pending','claimed')", (key,))
    for lease in connection.execute(
        "SELECT leases.* FROM leases JOIN slots USING (step, slot) WHERE leases.worker=?"
        " AND leases.state IN ('leased','submitted') AND slots.lease_id=leases.lease_id"
        " AND slots.state IN ('leased','submitted')",
        (key,),
    ).fetchall():
        slots.drop_lease(connection, lease, "void")
    for lease in connection.execute(
        "SELECT leases.* FROM leases JOIN slots USING (step, slot, lease_id) WHERE leases.step=? AND leases.worker=?"
        " AND slots.state='resolved'",
        (current_step(connection), key),
    ).fetchall():
        slots.end_lease(connection, lease, "void")
        slots.move_slot(connection, lease, "void")
