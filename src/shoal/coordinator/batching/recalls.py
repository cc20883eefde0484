"""A recorded batch whose training diverged is recalled whole: every group is audited, then the clean ones are proposed again.

Nothing that was published changes: the trainer returns to its last checkpoint and repeats the batches before this one. A batch of
which every group was audited is honest work, so recalling it again would not help: that is refused, and the trainer ends.
Runs inside one transaction of the store.
"""

from shoal.coordinator import ledger
from shoal.coordinator.run import Run
from shoal.coordinator.states import UNDECIDED, BatchState, GroupState, one_of
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import find, number, select, update, update_all
from shoal.coordinator.store.tables import BatchRow, GroupRow, SubmissionRow
from shoal.coordinator.work import slots
from shoal.coordinator.work.audits import audit_in_full, was_audited_in_full
from shoal.errors import RefusedError
from shoal.protocol import api

IN_BATCH = one_of(GroupState.PROPOSED, GroupState.CONSUMED)


def recall(connection: Connection, run: Run, body: api.RecallBody) -> int:
    """How many groups are audited now; the same answer again for a repeated request."""
    row = find(connection, BatchRow, "WHERE step=?", (body.step,))
    if row is None:
        raise RefusedError("unknown_batch", f"Step {body.step} has no batch yet.", status=404)
    if row.state is not BatchState.RECALLED and (body.attempt is None or row.attempt == body.attempt):
        _recall(connection, run, row, body.reason)
    return groups_in_audit(connection, body.step)


def _recall(connection: Connection, run: Run, row: BatchRow, reason: str) -> None:
    if number(connection, "SELECT COUNT(*) AS n FROM versions WHERE version > ?", (row.step,)):
        hint = (
            f"`shoal run rewind --to {row.step} --audit` returns to before it; the versions since are void then, and"
            " everything that they were trained on is audited."
        )
        raise RefusedError("batch_trained", f"Version {row.step + 1} is published.", hint=hint, status=409)
    groups = select(connection, GroupRow, f"WHERE batch_step=? AND state IN {IN_BATCH} ORDER BY position", (row.step,))
    doubtful = [group for group in groups if not group.logprobs_verified]
    if not doubtful:
        raise RefusedError(
            "all_audited",
            f"Every group of the batch of step {row.step} was audited: honest work makes it diverge.",
            hint="Lower training.learning_rate or tighten the clip, and start the trainer again. If earlier steps caused it, "
            "`shoal run rewind --to VERSION --audit` returns to before them.",
            status=409,
        )
    update_all(connection, doubtful, state=GroupState.WITHHELD)
    for group in groups:
        if group not in doubtful and group.state is GroupState.CONSUMED:
            update(connection, group, state=GroupState.PROPOSED)
    for submission_id in sorted({group.submission_id for group in doubtful}):
        audit_in_full(connection, run, _file(connection, submission_id))
    update(connection, row, state=BatchState.RECALLED, attempt=row.attempt + 1)
    names = [group.group_id for group in groups]
    ledger.append(
        connection,
        run.keypair,
        run.clock(),
        "recalled",
        epoch=row.epoch,
        step=row.step,
        attempt=row.attempt,
        groups=names,
        reason=reason,
    )


def propose_again(connection: Connection, run: Run) -> bool:
    """Proposes batches that were recalled and whose groups are all decided; true if there was one."""
    ready = [
        row
        for row in select(connection, BatchRow, f"WHERE state='{BatchState.RECALLED}'")
        if not groups_in_audit(connection, row.step)
    ]
    for row in ready:
        for group in _withheld(connection, row.step):
            _settle(connection, run, group)
        kept = select(
            connection, GroupRow, f"WHERE batch_step=? AND state IN {IN_BATCH} ORDER BY position", (row.step,)
        )
        slots.close_gaps(connection, kept)
        update(connection, row, state=BatchState.PROPOSED)
    return bool(ready)


def _settle(connection: Connection, run: Run, group: GroupRow) -> None:
    """A rejected file has withdrawn its groups already; what no validator could decide is left out."""
    if was_audited_in_full(run, _file(connection, group.submission_id)):
        update(connection, group, state=GroupState.PROPOSED, logprobs_verified=True)
    else:
        slots.withdraw_groups(connection, [group])


def groups_in_audit(connection: Connection, step: int) -> int:
    """Groups of a batch that was recalled whose files wait for a verdict."""
    return number(
        connection,
        "SELECT COUNT(*) AS n FROM groups JOIN submissions USING (submission_id)"
        f" WHERE batch_step=? AND groups.state='{GroupState.WITHHELD}' AND submissions.state IN {one_of(*UNDECIDED)}",
        (step,),
    )


def _withheld(connection: Connection, step: int) -> list[GroupRow]:
    return select(connection, GroupRow, f"WHERE batch_step=? AND state='{GroupState.WITHHELD}'", (step,))


def _file(connection: Connection, submission_id: str) -> SubmissionRow:
    row = find(connection, SubmissionRow, "WHERE submission_id=?", (submission_id,))
    assert row is not None, "a group is of a submission"
    return row
