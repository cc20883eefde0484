"""Verdicts and what follows from them: credit, trust, drift, bans, withdrawn groups, and the batch that a verdict completes.

A verdict and all its consequences are one transaction.
"""

import json
from typing import Literal

from blake3 import blake3

from shoal.coordinator import ledger
from shoal.coordinator.batching.recalls import propose_again
from shoal.coordinator.batching.steps import advance, current_step, epoch
from shoal.coordinator.ledger import held_back
from shoal.coordinator.rules import batches, drift, trust
from shoal.coordinator.run import Run
from shoal.coordinator.states import (
    FILLING,
    UNDECIDED,
    UNUSED,
    GroupState,
    LeaseState,
    SlotState,
    SubmissionState,
    one_of,
)
from shoal.coordinator.store import task_stats
from shoal.coordinator.store.database import Connection, Transaction
from shoal.coordinator.store.rows import find, number, select, update, update_all
from shoal.coordinator.store.tables import GroupRow, LeaseRow, SubmissionRow, WorkerRow
from shoal.coordinator.work import duplicates, slots
from shoal.coordinator.work.credit import add_credit
from shoal.coordinator.work.deliveries import record_delivery, record_failure
from shoal.coordinator.work.submissions import lease_of_submission, try_again
from shoal.coordinator.workers import introduce, known_worker, save_trust, trust_record
from shoal.errors import RefusedError
from shoal.files import digest_bytes
from shoal.protocol import api
from shoal.protocol.steps import group_name
from shoal.protocol.verdicts import Reason, public_reason

Use = Literal["counts", "unpaid", "further", "late", "unused", "confirmed", "rejected"]
"""What becomes of a file: it fills its slot (and is paid or not), another one does (and it shares the credit or came late), its key
is in quarantine, an audit confirms it, or it is rejected."""
BanCause = Literal["verdict", "drift", "owner"]


def record_verdict(connection: Transaction, run: Run, body: api.VerdictBody) -> bool:
    """Applies a verdict once, and says so again when asked again; false if the claim had run out."""
    row = find(connection, SubmissionRow, "WHERE submission_id=?", (body.submission_id,))
    if row is None:
        raise RefusedError("unknown_submission", "There is no such submission.", status=404)
    if row.claim_id != body.claim_id or row.state is SubmissionState.VOID:
        return False
    if row.state is SubmissionState.CLAIMED:
        _apply(connection, run, row, body)
        propose_again(connection, run)
        advance(connection, run)
    return True


def _apply(connection: Transaction, run: Run, row: SubmissionRow, body: api.VerdictBody) -> None:
    event = trust.event_of(body.accepted, bool(body.audited_groups), body.reasons)
    if event is None:
        try_again(connection, run, row, body.reasons, body.detail or ", ".join(body.reasons))
        return
    if not body.accepted:
        _reject(connection, run, row, body, event)
    elif row.decided_at is not None:
        _confirm(connection, run, row, body, event)
    elif duplicates.differs(connection, row, body) and duplicates.audit_both(connection, run, row):
        return
    else:
        _accept(connection, run, row, body, event)
    if body.audited_groups:
        _add_drift(connection, run, row.worker, body)


def _close(
    connection: Connection,
    run: Run,
    row: SubmissionRow,
    body: api.VerdictBody,
    use: Use,
    share: duplicates.Share | None = None,
) -> LeaseRow:
    """Records the verdict with everything that its consequences follow from; returns the lease."""
    now, verdict = run.clock(), body.model_dump_json()
    tokens = sum(group.tokens for group in body.groups) if body.accepted else 0
    paid = tokens if use == "counts" else row.paid
    update(connection, row, state=SubmissionState.DECIDED, decided_at=now, verdict=verdict, paid=paid)
    lease = lease_of_submission(connection, row)
    held_back.note_verdict(connection, lease.step_id, row.audit_id)
    ledger.append(
        connection,
        run.keypair,
        now,
        "verdict",
        worker=row.worker,
        **lease.step_id.fields(),
        slot=lease.slot,
        lease=row.lease_id,
        version=lease.policy_version,
        file=row.digest,
        signature=row.signature,
        issued=lease.issued_at,
        received=row.received_at,
        position=row.position,
        use=use,
        accepted=body.accepted,
        reasons=body.reasons,
        tokens=tokens,
        groups=run.descriptor.rollouts.tasks_per_slot,
        useful=[group.group for group in body.groups if group.useful] if body.accepted else [],
        shares=share.lease_id if share else None,
        files=share.other_files if share else 0,
        audited=body.audited_groups,
        drift=_drift_level(connection, row, body),
        audit_drawn=row.groups_to_audit,
        audit_rate=row.audit_rate,
        useful_rate=row.useful_rate,
        audit_step=row.audit_id,
        verdict=digest_bytes(verdict.encode()),
        salt=_salt(run, row),
    )
    return lease


def _salt(run: Run, row: SubmissionRow) -> str:
    """Heads of the ledger are public before its newest entries: without it the worker could try what its verdict says."""
    return blake3(f"shoal verdict/{row.submission_id}/{row.claim_id}".encode(), key=run.secret).hexdigest(16)


def _drift_level(connection: Connection, row: SubmissionRow, body: api.VerdictBody) -> drift.DriftLevel:
    """After this verdict; the sum itself would tell a forger how far it may go."""
    worker = known_worker(connection, row.worker)
    return drift.level(drift.total(_drift_sums(worker, body)) if body.audited_groups else worker.drift)


def _drift_sums(worker: WorkerRow, body: api.VerdictBody) -> drift.Sums:
    return drift.after(tuple(json.loads(worker.drift_sums)), body.metrics.drift_llrs)


def _accept(
    connection: Transaction, run: Run, row: SubmissionRow, body: api.VerdictBody, event: trust.TrustEvent
) -> None:
    introduce(connection, run, known_worker(connection, row.worker))
    lease, tokens = lease_of_submission(connection, row), sum(group.tokens for group in body.groups)
    worker = record_delivery(connection, run, row, lease, tokens)
    usable = trust.is_usable(trust_record(worker), run.config.trust)
    slot = slots.resolve_slot(connection, lease) if usable else None
    if not usable:  # verified, but another key fills the slot
        slots.release_slot(connection, lease)
    if usable and slot is None:
        share = duplicates.share_of(connection, run, row, lease)
        _close(connection, run, row, body, "further" if share.in_time else "late", share)
        duplicates.pay_share(connection, run, row, share)
        return
    earns = usable and not _is_expired_choice(connection, run, lease)
    _close(connection, run, row, body, "counts" if earns else "unpaid" if usable else "unused")
    if slot is not None:
        kind = {"deferred": slot.deferred, "voided": lease.epoch < epoch(connection)}
        groups = [_group_row(lease, row, body, group, **kind) for group in body.groups]
        slots.add_groups(connection, groups)
        for group in body.groups:
            task_stats.count_group(connection, group)
    worker = _save_event(connection, run, worker, body, event)
    add_credit(connection, run, worker, row, tokens if earns else 0)


def _confirm(
    connection: Connection, run: Run, row: SubmissionRow, body: api.VerdictBody, event: trust.TrustEvent
) -> None:
    """A file that counts, or counted, has passed an audit of everything in it; what was held back waits for a batch again."""
    _close(connection, run, row, body, "confirmed")
    of_file = select(connection, GroupRow, "WHERE submission_id=?", (row.submission_id,))
    held_back = [group for group in of_file if group.state is GroupState.WITHHELD and group.batch_step is None]
    slots.return_groups(connection, held_back)
    waiting = [group for group in of_file if group.state is GroupState.ACCEPTED]
    update_all(connection, waiting, logprobs_verified=True)  # those of a batch keep what it was recorded with
    _save_event(connection, run, known_worker(connection, row.worker), body, event)


def _save_event(
    connection: Connection, run: Run, worker: WorkerRow, body: api.VerdictBody, event: trust.TrustEvent
) -> WorkerRow:
    share = len(body.audited_groups) / run.descriptor.rollouts.tasks_per_slot
    return save_trust(connection, worker, trust.after(trust_record(worker), event, run.config.trust, share))


def _is_expired_choice(connection: Connection, run: Run, lease: LeaseRow) -> bool:
    """Whether the key worked with an older version than it could have had, and too long for any batch."""
    if lease.policy_version >= batches.oldest_version(current_step(connection), run.config.training):
        return False
    newest = number(connection, "SELECT MAX(version) AS n FROM versions WHERE published_at <= ?", (lease.issued_at,))
    return newest > lease.policy_version


def _group_row(
    lease: LeaseRow, row: SubmissionRow, body: api.VerdictBody, group: api.GroupVerdict, *, deferred: bool, voided: bool
) -> GroupRow:
    return GroupRow(
        group_id=group_name(lease.step_id, lease.slot, group.group),
        submission_id=row.submission_id,
        worker=row.worker,
        step=lease.step,
        slot=lease.slot,
        number=group.group,
        policy_version=lease.policy_version,
        useful=group.useful,
        tokens=group.tokens,
        rewards=json.dumps(group.rewards),
        task_rewards=json.dumps(group.task_rewards),
        logprobs_verified=group.group in body.audited_groups,
        state=_first_state(group, voided=voided),
        deferred=deferred,
        epoch=lease.epoch,
    )


def _first_state(group: api.GroupVerdict, *, voided: bool) -> GroupState:
    """Work of a voided step is paid for and enters no batch."""
    if not group.useful:
        return GroupState.NO_SIGNAL
    return GroupState.WITHDRAWN if voided else GroupState.ACCEPTED


def _reject(
    connection: Transaction, run: Run, row: SubmissionRow, body: api.VerdictBody, event: trust.TrustEvent
) -> None:
    slots.release_slot(connection, _close(connection, run, row, body, "rejected"))
    unused = f"WHERE submission_id=? AND state IN {one_of(*UNUSED)}"
    slots.withdraw_groups(connection, select(connection, GroupRow, unused, (row.submission_id,)))
    worker = record_failure(connection, run, row.worker)
    worker = update(connection, worker, rejected=worker.rejected + 1)
    record = trust.after(trust_record(worker), event, run.config.trust)
    if record.state == "banned" and worker.state != "banned":
        ban(connection, run, worker, f"{', '.join(body.reasons)}: {body.detail}", by="verdict")
    else:
        save_trust(connection, worker, record)


def _add_drift(connection: Transaction, run: Run, key: str, body: api.VerdictBody) -> None:
    """Deviations too small for a single verdict ban a key once they have added up."""
    worker = known_worker(connection, key)
    if worker.state == "banned":
        return
    before, sums = worker.drift, _drift_sums(worker, body)
    worker = update(connection, worker, drift=drift.total(sums), drift_sums=json.dumps(sums))
    if drift.level(worker.drift) == "cheating":
        detail = f"audits add up to e^{worker.drift:.1f} against honest work"
        ban(connection, run, worker, f"{Reason.SAMPLING_DRIFT}: {detail}", by="drift")
    elif drift.became_suspicious(before, worker.drift):
        save_trust(connection, worker, trust.after(trust_record(worker), "anomaly", run.config.trust))


def ban(connection: Transaction, run: Run, worker: WorkerRow, reason: str, *, by: BanCause) -> WorkerRow:
    """Bans a key for good: stake slashed, unconsumed groups withdrawn, pending work void, leases opened to others."""
    now, held = run.clock(), worker.credit_held
    banned = update(connection, worker, state="banned", reason=reason, banned_at=now, credit_held=0)
    ledger.append(connection, run.keypair, now, "slash", worker=worker.key, held=-held, slashed=held)
    ledger.append(connection, run.keypair, now, "ban", worker=worker.key, reason=public_reason(reason), by=by)
    connection.on_commit(lambda: run.presence.forget_banned(worker.key))
    connection.on_commit(lambda: run.metrics.event("ban", worker=worker.key, by=by, why=public_reason(reason)))
    _withdraw(connection, worker.key)
    return banned


def _withdraw(connection: Connection, key: str) -> None:
    """Takes back what no recorded batch holds; slots of the current step and of the next one count as never done, so that others
    fill the gap."""
    unused = f"WHERE state IN {one_of(*UNUSED)} AND worker=?"
    slots.withdraw_groups(connection, select(connection, GroupRow, unused, (key,)))
    undecided = f"WHERE worker=? AND state IN {one_of(*UNDECIDED)}"
    update_all(connection, select(connection, SubmissionRow, undecided, (key,)), state=SubmissionState.VOID)
    for lease in select(
        connection,
        LeaseRow,
        f"JOIN slots USING (epoch, step, slot) WHERE leases.worker=? AND (leases.state='{LeaseState.LEASED}'"
        f" OR leases.state='{LeaseState.SUBMITTED}' AND slots.state IN {one_of(*FILLING)})",
        (key,),
    ):
        slots.drop_lease(connection, lease, LeaseState.VOID)
    for lease in select(
        connection,
        LeaseRow,
        "JOIN slots USING (epoch, step, slot, lease_id) WHERE leases.epoch=? AND leases.step>=? AND leases.worker=?"
        f" AND slots.state='{SlotState.RESOLVED}'",
        (epoch(connection), current_step(connection), key),
    ):
        slots.void_slot(connection, slots.move_lease(connection, lease, LeaseState.VOID))
