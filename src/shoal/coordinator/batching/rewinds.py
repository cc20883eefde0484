"""A rewind returns the run to a version: everything after it is void, and a new epoch begins.

Voided are the batches and versions after it, every lease, and every group that no earlier batch holds; credit stays, and files that
have arrived are still verified and paid. The secrets of voided steps are published, those of the new epoch were committed before.
One transaction, signed by the run key; trainer, origin and workers follow from what it wrote, whenever they ask next.
"""

from shoal.coordinator import ledger
from shoal.coordinator.batching import steps
from shoal.coordinator.ledger import secrets
from shoal.coordinator.ledger.heads import Heads
from shoal.coordinator.run import Run
from shoal.coordinator.states import UNUSED, GroupState, LeaseState, SubmissionState, one_of
from shoal.coordinator.store import meta
from shoal.coordinator.store.database import Connection, Transaction
from shoal.coordinator.store.rows import find, insert, select, update_all
from shoal.coordinator.store.tables import GroupRow, LeaseRow, RewindRow, SubmissionRow, VersionRow, WorkerRow
from shoal.coordinator.work import slots
from shoal.coordinator.work.audits import audit_in_full
from shoal.errors import RefusedError
from shoal.identity import verify_signature
from shoal.protocol import api
from shoal.protocol.signing import rewound_message
from shoal.protocol.steps import StepId

UNBATCHED = f"state IN {one_of(*UNUSED)}"
VOIDED = f"(state='{GroupState.CONSUMED}' AND batch_step >= ?)"


def line(connection: Connection, heads: Heads | None = None) -> api.LineAnswer:
    """Which versions count, for everybody who keeps some."""
    return api.LineAnswer(
        epoch=steps.epoch(connection),
        newest_version=steps.newest_version(connection),
        checkpoints=steps.checkpoints(connection),
        rewinds=views(connection),
        ledger_head=heads.newest(connection) if heads is not None else "",
    )


def views(connection: Connection) -> list[api.RewindView]:
    return [_view(row) for row in select(connection, RewindRow, "ORDER BY epoch")]


def rewind(connection: Transaction, run: Run, body: api.RewindBody) -> api.RewindView:
    """Once; a repeated request gets the same answer."""
    message = rewound_message(run.descriptor.run_id, body.epoch, body.version, body.manifest_digest)
    verify_signature(run.descriptor.run_key, message, body.signature)
    known = find(connection, RewindRow, "WHERE epoch=?", (body.epoch,))
    if known is not None and known.version == body.version:
        return _view(known)
    _require_possible(connection, body)
    return _view(_rewind(connection, run, body))


def _require_possible(connection: Connection, body: api.RewindBody) -> None:
    now, newest = steps.epoch(connection), steps.newest_version(connection)
    if body.epoch != now + 1:
        hint = "Look at the run with `shoal run status`, and give the command again if it is still wanted."
        raise RefusedError(
            "epoch", f"The run is in epoch {now}; epoch {body.epoch} cannot follow it.", hint=hint, status=409
        )
    version = find(connection, VersionRow, "WHERE version=?", (body.version,))
    if version is None:
        raise RefusedError("unknown_version", f"Version {body.version} is not published.", status=404)
    if version.manifest_digest != body.manifest_digest:
        raise RefusedError("version_conflict", f"Version {body.version} has other weights than these.", status=409)
    if newest == body.version and steps.current_step(connection) == body.version:
        hint = "Name an earlier version with --to."
        raise RefusedError("nothing_to_rewind", f"Nothing follows version {newest} yet.", hint=hint, status=409)


def _rewind(connection: Transaction, run: Run, body: api.RewindBody) -> RewindRow:
    first, before = StepId(body.epoch, body.version, 0), steps.current_id(connection)
    audits = _audit_voided(connection, run, body.version) if body.audit else 0
    row = RewindRow(
        epoch=body.epoch,
        version=body.version,
        newest_before=steps.newest_version(connection),
        groups=_withdraw(connection, body.version),
        audits=audits,
        at=run.clock(),
        reason=body.reason,
    )
    _void_work(connection, before)
    _forget(connection, body.version)
    meta.write(connection, "epoch", str(body.epoch))
    meta.write(connection, "attempt", "0")
    published = secrets.begin_epoch(connection, run, first)
    insert(connection, row)
    ledger.append(
        connection,
        run.keypair,
        row.at,
        "rewound",
        **first.fields(),
        version=body.version,
        manifest=body.manifest_digest,
        newest_before=row.newest_before,
        groups=row.groups,
        reason=body.reason,
        step_secrets=published,
        signature=body.signature,
    )
    connection.on_commit(lambda: _tell(run, row))
    return row


def _audit_voided(connection: Connection, run: Run, version: int) -> int:
    """Files of the voided batches that are still there; how many wait for a full audit now."""
    files = select(
        connection,
        SubmissionRow,
        f"WHERE state='{SubmissionState.DECIDED}' AND collected_at IS NULL AND submission_id IN"
        f" (SELECT submission_id FROM groups WHERE {VOIDED})",
        (version,),
    )
    return sum(audit_in_full(connection, run, file) for file in files)


def _withdraw(connection: Connection, version: int) -> int:
    """Groups that the new epoch must not use; how many."""
    groups = select(connection, GroupRow, f"WHERE {UNBATCHED} OR {VOIDED}", (version,))
    slots.withdraw_groups(connection, groups)
    return len(groups)


def _void_work(connection: Connection, before: StepId) -> None:
    """No file of a lease of the old epoch arrives any more; the loss is not its key's."""
    for lease in select(connection, LeaseRow, f"WHERE state='{LeaseState.LEASED}'"):
        slots.drop_lease(connection, lease, LeaseState.VOID)
    for step in (before.step, before.step + 1):
        slots.close_step(connection, before.epoch, step)


def _forget(connection: Connection, version: int) -> None:
    """What the ledger alone remembers: batches, versions and measurements that do not count any more."""
    connection.execute("DELETE FROM batches WHERE step >= ?", (version,))
    connection.execute("DELETE FROM versions WHERE version > ?", (version,))
    connection.execute("DELETE FROM evaluations WHERE version > ?", (version,))
    update_all(connection, select(connection, WorkerRow, "WHERE newest_used > ?", (version,)), newest_used=version)


def _tell(run: Run, row: RewindRow) -> None:
    if run.timing is not None:
        run.timing.forget()
    run.metrics.event("rewound", epoch=row.epoch, version=row.version, lost_steps=row.newest_before - row.version)


def _view(row: RewindRow) -> api.RewindView:
    return api.RewindView(
        epoch=row.epoch,
        version=row.version,
        newest_before=row.newest_before,
        groups=row.groups,
        audits=row.audits,
        at=row.at,
        reason=row.reason,
    )
