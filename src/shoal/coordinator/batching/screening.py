"""From a proposed batch to a recorded one: groups that the trainer finds improbable are held back and audited.

Lost groups are replaced from those that wait already and could have been in the batch; a step never waits for new ones, because
hostile keys could make it wait for ever. If none are left the batch is trained smaller. Runs inside one transaction of the store.
"""

import json
from collections import Counter

from shoal.coordinator import ledger
from shoal.coordinator.batching.steps import GROUP_VIEW, batch_record, require_epoch, step_counts, step_view
from shoal.coordinator.ledger import secrets
from shoal.coordinator.rules import batches, unaudited
from shoal.coordinator.run import Run
from shoal.coordinator.states import BatchState, GroupState
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import find, query, select, update, update_all
from shoal.coordinator.store.tables import BatchRow, GroupRow, SubmissionRow
from shoal.coordinator.work import slots
from shoal.coordinator.work.audits import audit_in_full
from shoal.errors import RefusedError
from shoal.protocol import api
from shoal.protocol.steps import StepId


def screen(connection: Connection, run: Run, body: api.ScreeningBody) -> api.BatchRecord:
    """Takes the statistics of one proposal once; returns the record, or the next proposal."""
    require_epoch(connection, body.epoch)
    row = find(connection, BatchRow, "WHERE step=?", (body.step,))
    if row is None:
        raise RefusedError("unknown_batch", f"Step {body.step} has no batch yet.", status=404)
    if row.state is BatchState.PROPOSED and row.attempt == body.attempt:
        _decide(connection, run, row, body)
    record = batch_record(connection, body.step)
    assert record is not None, "the row was found"
    return record


def _decide(connection: Connection, run: Run, row: BatchRow, body: api.ScreeningBody) -> None:
    proposed = proposed_groups(connection, row.step)
    missing = [group.group_id for group in proposed if group.group_id not in body.statistics]
    if missing:
        raise RefusedError("malformed", f"There is no statistic of group {missing[0]}.", status=422)
    audited = [group.group_id for group in proposed if group.logprobs_verified]
    bad = unaudited.withheld(body.statistics, audited, run.config.training.screening_limit)
    lost = [group for group in proposed if group.group_id in bad]
    withhold(connection, run, lost)
    kept = [group for group in proposed if group.group_id not in bad]
    slots.close_gaps(connection, kept)
    if lost and row.attempt + 1 < unaudited.MOST_ATTEMPTS and _refill(connection, run, row, len(kept)):
        update(connection, row, attempt=row.attempt + 1)
    else:
        record(connection, run, row)


def proposed_groups(connection: Connection, step: int) -> list[GroupRow]:
    rest = f"WHERE batch_step=? AND state='{GroupState.PROPOSED}' ORDER BY position"
    return select(connection, GroupRow, rest, (step,))


def withhold(connection: Connection, run: Run, groups: list[GroupRow]) -> None:
    """Holds groups back and sends their files to an audit of everything in them."""
    update_all(connection, groups, state=GroupState.WITHHELD, batch_step=None, position=None)
    for submission_id in sorted({group.submission_id for group in groups}):
        file = find(connection, SubmissionRow, "WHERE submission_id=?", (submission_id,))
        assert file is not None, "a group is of a submission"
        audit_in_full(connection, run, file)


def _refill(connection: Connection, run: Run, row: BatchRow, kept: int) -> int:
    """Fills gaps of the proposal; how many groups came."""
    view = step_view(connection, row.step, step_counts(connection, run, row.step))
    places = f"WHERE batch_step=? AND state='{GroupState.PROPOSED}' ORDER BY position"
    proposed = query(connection, batches.GroupView, f"SELECT {GROUP_VIEW} FROM groups {places}", (row.step,))
    chosen = batches.refill(view, proposed, run.config.training, run.config.trust)
    waiting = {group.group_id: group for group in select(connection, GroupRow, f"WHERE state='{GroupState.ACCEPTED}'")}
    slots.propose_groups(connection, [waiting[group.group_id] for group in chosen], row.step, kept)
    return len(chosen)


def record(connection: Connection, run: Run, row: BatchRow) -> None:
    """Makes the proposal final: what every resume trains on. The secret of the step is published with it."""
    groups, identity = proposed_groups(connection, row.step), StepId(row.epoch, row.step)
    for group in groups:
        update(connection, group, state=GroupState.CONSUMED)
    dropped = json.loads(row.dropped)
    if row.groups > len(groups):
        dropped["withheld"] = row.groups - len(groups)
    update(
        connection,
        row,
        state=BatchState.RECORDED,
        groups=len(groups),
        dropped=json.dumps(dropped),
        ages=json.dumps(Counter(row.step - group.policy_version for group in groups)),
    )
    ledger.append(
        connection,
        run.keypair,
        run.clock(),
        "recorded",
        **identity.fields(),
        groups=[group.group_id for group in groups],
        step_secret=secrets.publish(connection, run, identity),
    )
