"""Submissions: uploads that answer a lease, and the claims of validators on them, until a verdict or quarantine.

Every function runs inside one transaction of the store.
"""

import json
import uuid
from collections.abc import Sequence

from shoal.coordinator import ledger, slots
from shoal.coordinator.context import Context
from shoal.coordinator.leasing import lease_of
from shoal.coordinator.rules import retries, trust
from shoal.coordinator.steps import current_step, run_state
from shoal.coordinator.store.database import Connection, Row
from shoal.coordinator.workers import require_worker, trust_record
from shoal.errors import RefusedError
from shoal.identity import verify_signature
from shoal.protocol import api
from shoal.protocol.assignment import step_secret
from shoal.protocol.signing import submission_message
from shoal.protocol.verdicts import Reason


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


def claim(connection: Connection, context: Context, key: str, body: api.ClaimBody) -> api.ClaimAnswer:
    """The oldest submission that nobody judges; the same one again for a repeated request."""
    context.require_role(key, "validator")
    now = context.clock()
    release_claims(connection, context)
    row = connection.execute(
        "SELECT * FROM submissions WHERE state='claimed' AND claimed_by=? AND claim_request=?", (key, body.request_id)
    ).fetchone()
    if row is None:
        row = connection.execute(
            "SELECT * FROM submissions WHERE state='pending' AND retry_at <= ? ORDER BY received_at LIMIT 1", (now,)
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
        numerics_class=row["numerics_class"],
    )
    return api.ClaimAnswer(claim=claimed, run_state=run_state(connection, context))


def release_claims(connection: Connection, context: Context) -> bool:
    """Claims of validators that died return; a file that nobody survives is set aside without blame."""
    lost = connection.execute(
        "SELECT * FROM submissions WHERE state='claimed' AND claim_expires < ?", (context.clock(),)
    ).fetchall()
    for row in lost:
        try_again(connection, context, row, [Reason.VALIDATOR_CRASH], "no verdict before the claim ran out")
        # The claim was the wait: whoever is free takes it at once.
        connection.execute(
            "UPDATE submissions SET claim_id=NULL, retry_at=0 WHERE submission_id=?", (row["submission_id"],)
        )
    return bool(lost)


def try_again(connection: Connection, context: Context, row: Row, reasons: Sequence[Reason], why: str) -> None:
    now, faults = context.clock(), row["faults"] + 1
    counted = retries.counts(reasons, now - row["received_at"])
    if not counted or row["tries"] < context.config.validation.max_tries:
        connection.execute(
            "UPDATE submissions SET state='pending', faults=?, tries=?, retry_at=? WHERE submission_id=?",
            (faults, row["tries"] - (not counted), now + retries.wait_s(faults), row["submission_id"]),
        )
        return
    connection.execute(
        "UPDATE submissions SET state='set_aside', judged_at=?, verdict=? WHERE submission_id=?",
        (context.clock(), json.dumps({"detail": why}), row["submission_id"]),
    )
    lease = connection.execute("SELECT * FROM leases WHERE lease_id=?", (row["lease_id"],)).fetchone()
    slots.drop_lease(connection, lease, "set_aside")
    ledger.append(
        connection, context.keypair, context.clock(), "set_aside", submission=row["submission_id"], why=why[:500]
    )
