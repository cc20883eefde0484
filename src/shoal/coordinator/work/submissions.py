"""Submissions: uploads that answer a lease, and the claims of validators on them, until a verdict or quarantine.

Every function runs inside one transaction of the store.
"""

import json
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.coordinator import ledger
from shoal.coordinator.batching.steps import current_id, epoch, run_state
from shoal.coordinator.rules import retries, trust, unaudited
from shoal.coordinator.run import Run
from shoal.coordinator.states import LeaseState, SlotState, SubmissionState
from shoal.coordinator.store.database import Connection, Transaction
from shoal.coordinator.store.rows import find, insert, number, select, update
from shoal.coordinator.store.tables import LeaseRow, SubmissionRow, VersionRow, WorkerRow
from shoal.coordinator.work import slots
from shoal.coordinator.work.audits import left_of_key
from shoal.coordinator.work.deliveries import drop_lease
from shoal.coordinator.work.leasing import lease_of
from shoal.coordinator.workers import require_worker, trust_record
from shoal.errors import RefusedError
from shoal.identity import verify_signature
from shoal.protocol import api
from shoal.protocol.evidence import Receipt, seal
from shoal.protocol.signing import submission_message
from shoal.protocol.steps import step_secret
from shoal.protocol.verdicts import Reason


@dataclass(frozen=True)
class ReceivedFile:
    """A file that a worker sent for a lease."""

    worker: str
    lease_id: str
    submission_id: str
    digest: str
    size_bytes: int
    signature: str
    """The worker's, over lease and digest; kept as evidence."""


def verify_upload(run: Run, key: str, lease_id: str, digest: str, signature: str) -> None:
    verify_signature(key, submission_message(run.descriptor.run_id, lease_id, digest), signature)


def check_upload(connection: Connection, run: Run, key: str, lease_id: str, digest: str) -> LeaseRow | None:
    """The lease that this upload answers, none if the same file was taken before, or the reason why it is refused."""
    require_worker(connection, key)
    return _answered_lease(connection, run, key, lease_id, digest)


def _answered_lease(connection: Connection, run: Run, key: str, lease_id: str, digest: str) -> LeaseRow | None:
    lease = find(connection, LeaseRow, "WHERE lease_id=? AND worker=?", (lease_id, key))
    if lease is None:
        raise RefusedError("unknown_lease", "This key holds no such lease.", hint="Take a new lease.", status=404)
    known = find(connection, SubmissionRow, "WHERE lease_id=?", (lease_id,))
    if known is not None and known.digest == digest:
        return None
    if known is not None:
        raise RefusedError("already_submitted", "Another file was submitted for this lease.", status=409)
    if lease.epoch < epoch(connection):
        text = "The owner returned the run to an earlier version: this work is void."
        raise RefusedError("lease_expired", text, hint="Take a new lease.", status=409)
    if lease.state is not LeaseState.LEASED or lease.expires_at < run.clock():
        raise RefusedError("lease_expired", "The lease ended before the file.", hint="Take a new lease.", status=409)
    return lease


def accept_upload(connection: Transaction, run: Run, file: ReceivedFile) -> api.SubmissionAnswer:
    """Takes in a file whose signature was verified."""
    worker = require_worker(connection, file.worker)
    lease = _answered_lease(connection, run, file.worker, file.lease_id, file.digest)
    if lease is None:
        known = find(connection, SubmissionRow, "WHERE lease_id=?", (file.lease_id,))
        assert known is not None, "check_upload found it"
        head = ledger.hash_at(connection, known.position)
        return _answer(run, known, lease_of_submission(connection, known), head)
    position, head = ledger.head(connection)
    row = new_submission(connection, run, worker, file, position)
    insert(connection, row)
    lease = slots.move_lease(connection, lease, LeaseState.SUBMITTED)
    slots.submit_slot(connection, lease)
    connection.on_commit(lambda: run.presence.seen(file.worker))
    return _answer(run, row, lease, head)


def _answer(run: Run, row: SubmissionRow, lease: LeaseRow, head: str) -> api.SubmissionAnswer:
    """The same receipt however often the same file is sent. `head` is that of the ledger when it arrived first."""
    receipt = Receipt(
        run_id=run.descriptor.run_id,
        at=row.received_at,
        entries=row.position,
        head=head,
        worker=row.worker,
        lease=row.lease_id,
        **lease.step_id.fields(),
        slot=lease.slot,
        file=row.digest,
    )
    return api.SubmissionAnswer(submission_id=row.submission_id, state=row.state, receipt=seal(receipt, run.keypair))


def new_submission(
    connection: Connection, run: Run, worker: WorkerRow, file: ReceivedFile, position: int
) -> SubmissionRow:
    """The row of a file that arrives now, with the draw of its audit. `position` counts the ledger's entries."""
    drawn_by = current_id(connection)
    rate, groups = trust.audit_rate(trust_record(worker), run.config.trust), run.descriptor.rollouts.tasks_per_slot
    return SubmissionRow(
        submission_id=file.submission_id,
        lease_id=file.lease_id,
        worker=file.worker,
        digest=file.digest,
        size_bytes=file.size_bytes,
        signature=file.signature,
        received_at=run.clock(),
        audit_groups=json.dumps(trust.audited_groups(step_secret(run.secret, drawn_by), file.digest, rate, groups)),
        audit_step=drawn_by.step,
        audit_rate=rate,
        useful_rate=unaudited.useful_rate(run.config.training, run.config.trust),
        numerics_class=worker.numerics_class,
        audit_epoch=drawn_by.epoch,
        audit_attempt=drawn_by.attempt,
        position=position,
    )


_CLAIMABLE = f"submissions.state='{SubmissionState.PENDING}' AND submissions.retry_at <= ?"
_OF_LEASES = "JOIN leases USING (lease_id)"
_OF_SLOTS = f"{_OF_LEASES} JOIN slots ON slots.epoch=leases.epoch AND slots.step=leases.step AND slots.slot=leases.slot"
OLDEST = f"{_OF_LEASES} WHERE {_CLAIMABLE}"
WAITED_FOR = (
    f"{_OF_SLOTS} WHERE {_CLAIMABLE} AND slots.state='{SlotState.SUBMITTED}' AND slots.epoch=? AND slots.step=?"
    " AND slots.deferred=0"
)
"""Files that a batch waits for come first, or junk of new keys could keep the validators busy."""
OF_VOIDED_STEP = f"{_OF_LEASES} WHERE {_CLAIMABLE} AND submissions.decided_at IS NULL AND leases.epoch < ?"
"""Files that arrived before a rewind: few, and nothing else can be verified until work of the new epoch arrives."""
MOST_MISSING = 4
MOST_BYTES_TOGETHER = 32 << 20
"""Of the files that one validator claims at once: it holds all of them in memory, several times as large. How many it asks for
follows from the files before, so small ones followed by large ones must not fill it."""


def claim(connection: Connection, run: Run, key: str, body: api.ClaimBody) -> api.ClaimAnswer:
    """Submissions of one version that no validator has claimed: one that a batch waits for, else the oldest, and others beside
    it; the same again for a repeated request."""
    release_claims(connection, run)
    repeated = f"WHERE state='{SubmissionState.CLAIMED}' AND claimed_by=? AND claim_request=? ORDER BY received_at"
    rows = select(connection, SubmissionRow, repeated, (key, body.request_id)) or _claim_next(
        connection, run, key, body
    )
    claims, state = [_claim_of(connection, run, row) for row in rows], run_state(connection, run)
    return api.ClaimAnswer(
        claim=claims[0] if claims else None,
        beside=claims[1:],
        missing=[] if claims or body.ready is None else _missing(connection, run, [*body.ready, *body.fetching]),
        newest=None if body.ready is None or state == "finished" else _newest(connection, body.newest),
        run_state=state,
    )


def _claim_next(connection: Connection, run: Run, key: str, body: api.ClaimBody) -> list[SubmissionRow]:
    first = _waiting(connection, run, body.ready, 1)
    if not first:
        return []
    of_same_version = [lease_of_submission(connection, first[0]).manifest_digest]
    claimed = [_claim_row(connection, run, first[0], key, body.request_id)]
    left_bytes = MOST_BYTES_TOGETHER - first[0].size_bytes
    for row in _waiting(connection, run, of_same_version, body.most - 1):
        left_bytes -= row.size_bytes
        if left_bytes < 0:
            break
        claimed.append(_claim_row(connection, run, row, key, body.request_id))
    return claimed


def _waiting(connection: Connection, run: Run, manifests: Sequence[str] | None, most: int) -> list[SubmissionRow]:
    """Files that can be claimed, of these versions if some are named, those that come first."""
    if most < 1 or (manifests is not None and not manifests):
        return []
    now, current = run.clock(), current_id(connection)
    within = "" if manifests is None else f" AND leases.manifest_digest IN ({','.join('?' * len(manifests))})"
    end, named = f"{within} ORDER BY submissions.received_at LIMIT {most}", tuple(manifests or ())
    found: dict[str, SubmissionRow] = {}
    if current.epoch:
        voided = select(connection, SubmissionRow, OF_VOIDED_STEP + end, (now, current.epoch, *named))
        found |= {row.submission_id: row for row in voided}
    for kind, values in ((WAITED_FOR, (now, current.epoch, current.step)), (OLDEST, (now,))):
        if len(found) < most:
            rows = select(connection, SubmissionRow, kind + end, (*values, *named))
            found |= {row.submission_id: row for row in rows if row.submission_id not in found}
    return list(found.values())[:most]


def _claim_row(connection: Connection, run: Run, row: SubmissionRow, key: str, request_id: str) -> SubmissionRow:
    left = left_of_key(connection, run, row.worker)
    # The first version is whole, and so the largest.
    version_bytes = number(connection, "SELECT MAX(bytes_total) AS n FROM versions")
    return update(
        connection,
        row,
        state=SubmissionState.CLAIMED,
        claim_id=uuid.uuid4().hex,
        claimed_by=key,
        claim_request=request_id,
        claim_expires=run.clock() + retries.claim_s(run.config.validation.claim_s, version_bytes),
        unaudited_limit=_limits(run, row, left)[-1],
        tries=row.tries + 1,
    )


def _missing(connection: Connection, run: Run, known: Sequence[str]) -> list[api.WantedVersion]:
    """Versions of files that wait for a validator which has them."""
    others = f" AND leases.manifest_digest NOT IN ({','.join('?' * len(known))})" if known else ""
    waiting = f"JOIN submissions USING (lease_id) WHERE {_CLAIMABLE}{others} ORDER BY submissions.received_at LIMIT 64"
    leases = select(connection, LeaseRow, waiting, (run.clock(), *known))
    versions = dict.fromkeys((lease.policy_version, lease.manifest_digest) for lease in leases)
    return [api.WantedVersion(version=version, manifest_digest=digest) for version, digest in versions][:MOST_MISSING]


def _newest(connection: Connection, known: str | None) -> api.WantedVersion | None:
    """The newest version, unless the validator knows of it."""
    newest = find(connection, VersionRow, "ORDER BY version DESC LIMIT 1")
    if newest is None or newest.manifest_digest == known:
        return None
    return api.WantedVersion(version=newest.version, manifest_digest=newest.manifest_digest)


def _claim_of(connection: Connection, run: Run, row: SubmissionRow) -> api.Claim:
    groups = run.descriptor.rollouts.tasks_per_slot
    return api.Claim(
        claim_id=row.claim_id or "",
        submission_id=row.submission_id,
        worker_key=row.worker,
        digest=row.digest,
        lease=lease_of(run, lease_of_submission(connection, row)),
        audit_groups=row.groups_to_audit,
        audit_order=list(trust.audit_order(step_secret(run.secret, row.audit_id), row.digest, groups)),
        unaudited_limits=_limits(run, row, row.unaudited_limit),
        numerics_class=row.numerics_class,
    )


def _limits(run: Run, row: SubmissionRow, left_of_key: int) -> list[int]:
    coin = trust.rounding(step_secret(run.secret, row.audit_id), row.digest)
    return unaudited.limits_of_file(row.useful_rate, run.descriptor.rollouts.tasks_per_slot, coin, left_of_key)


def lease_of_submission(connection: Connection, row: SubmissionRow) -> LeaseRow:
    lease = find(connection, LeaseRow, "WHERE lease_id=?", (row.lease_id,))
    assert lease is not None, "a submission answers a lease"
    return lease


def release_claims(connection: Connection, run: Run) -> bool:
    """Claims that ran out return to the queue; a file on which validators keep failing is quarantined."""
    late = f"WHERE state='{SubmissionState.CLAIMED}' AND claim_expires < ?"
    lost = select(connection, SubmissionRow, late, (run.clock(),))
    for row in lost:
        after = try_again(connection, run, row, [Reason.VALIDATOR_CRASH], "no verdict before the claim ran out")
        # The claim was the wait: the next validator takes it at once.
        update(connection, after, claim_id=None, retry_at=0.0)
    return bool(lost)


def release_retries(connection: Connection, run: Run) -> bool:
    """Marks submissions whose wait has ended as claimable; true if there are any."""
    waiting = f"WHERE state='{SubmissionState.PENDING}' AND retry_at > 0 AND retry_at <= ?"
    due = select(connection, SubmissionRow, waiting, (run.clock(),))
    for row in due:
        update(connection, row, retry_at=0.0)
    return bool(due)


def try_again(
    connection: Connection, run: Run, row: SubmissionRow, reasons: Sequence[Reason], why: str
) -> SubmissionRow:
    """Returns a submission that could not be verified to the queue, or quarantines it."""
    now, is_voided = run.clock(), lease_of_submission(connection, row).epoch < epoch(connection)
    age_s = math.inf if is_voided else now - row.received_at  # nobody will publish a voided version again
    retry = retries.after_fault(reasons, age_s, row.tries, row.faults, run.config.validation.max_tries)
    if retry is None:
        return _quarantine(connection, run, row, why)
    return update(
        connection,
        row,
        state=SubmissionState.PENDING,
        faults=retry.faults,
        tries=retry.tries,
        retry_at=now + retry.wait_s,
    )


def _quarantine(connection: Connection, run: Run, row: SubmissionRow, why: str) -> SubmissionRow:
    now, note = run.clock(), json.dumps({"detail": why})
    after = update(connection, row, state=SubmissionState.QUARANTINED, decided_at=now, verdict=note)
    drop_lease(connection, run, lease_of_submission(connection, row), LeaseState.QUARANTINED)
    facts = {"worker": row.worker, "lease": row.lease_id, "file": row.digest, "why": why[:500]}
    ledger.append(connection, run.keypair, now, "quarantine", submission=row.submission_id, **facts)
    return after
