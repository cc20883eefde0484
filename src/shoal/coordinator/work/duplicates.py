"""Several files for one slot: the first accepted one counts, the others are compared with it and share its credit.

`rules.duplicates` compares the digests of their samples. Files that differ by more than rounding are audited, both of them; the
difference alone penalises no worker. Runs inside one transaction of the store.
"""

from dataclasses import dataclass
from itertools import zip_longest

from shoal.coordinator.rules import credit, duplicates
from shoal.coordinator.run import Run
from shoal.coordinator.states import SlotState, SubmissionState
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import select
from shoal.coordinator.store.tables import LeaseRow, SubmissionRow
from shoal.coordinator.work.audits import audit_in_full
from shoal.coordinator.work.credit import add_credit, take_credit
from shoal.coordinator.work.deliveries import observe
from shoal.coordinator.workers import known_worker
from shoal.protocol import api

OTHER_FILES = (
    "JOIN leases USING (lease_id)"
    " JOIN slots ON slots.epoch=leases.epoch AND slots.step=leases.step AND slots.slot=leases.slot"
    " WHERE (leases.epoch, leases.step, leases.slot) = (SELECT epoch, step, slot FROM leases WHERE lease_id=?)"
    " AND submissions.lease_id <> ?"
    f" AND submissions.state='{SubmissionState.DECIDED}'"
)
COUNTING = f" AND slots.state='{SlotState.RESOLVED}' AND slots.lease_id=submissions.lease_id"


def _others(connection: Connection, row: SubmissionRow, which: str = "") -> list[SubmissionRow]:
    return select(connection, SubmissionRow, OTHER_FILES + which, (row.lease_id, row.lease_id))


def differs(connection: Connection, row: SubmissionRow, body: api.VerdictBody) -> bool:
    """Whether the file differs by more than rounding from the one that counts."""
    verdicts = [api.VerdictBody.model_validate_json(one.verdict or "") for one in _others(connection, row, COUNTING)]
    return any(not duplicates.agree(_content(verdict), _content(body)) for verdict in verdicts)


def _content(body: api.VerdictBody) -> duplicates.Content:
    samples = {
        (group.group, number): digest
        for group in body.groups
        for number, (_, digest) in enumerate(zip_longest(group.rewards, group.samples, fillvalue=""))
    }
    return duplicates.Content(samples, body.flips_allowed)


def audit_both(connection: Connection, run: Run, row: SubmissionRow) -> bool:
    """Sends the file, and the one that counts, to a full audit unless they had one; true if the file itself waits for it now."""
    waits = audit_in_full(connection, run, row)
    for one in _others(connection, row, COUNTING):
        audit_in_full(connection, run, one)
    return waits


@dataclass(frozen=True)
class Share:
    """The part of a further accepted file in what its slot has paid."""

    other_files: int
    in_time: bool
    counting: SubmissionRow | None
    """The file that fills the slot and was paid for it."""

    @property
    def lease_id(self) -> str | None:
        return self.counting.lease_id if self.counting is not None else None


def share_of(connection: Connection, run: Run, row: SubmissionRow, lease: LeaseRow) -> Share:
    in_time = row.received_at - lease.issued_at <= observe(connection, run).pace.in_time_s
    counting = _others(connection, row, COUNTING) if in_time else []
    return Share(len(_others(connection, row)), in_time, counting[0] if counting else None)


def pay_share(connection: Connection, run: Run, row: SubmissionRow, share: Share) -> None:
    """A further accepted file that came in time gets a part of what the slot has paid; it earns no trust."""
    moved = 0
    if share.counting is not None:
        payer = known_worker(connection, share.counting.worker)
        moved = credit.share(share.counting.paid, share.other_files, payer.credit_held)
        take_credit(connection, run, payer, row, moved)
    add_credit(connection, run, known_worker(connection, row.worker), row, moved)
