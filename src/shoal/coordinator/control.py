"""The owner's commands: pause, resume, drain, ban, unban. Each runs inside one transaction and is recorded in the ledger.

*Paused*: no new leases, everything else goes on. *Draining*: no new leases; once nothing is leased, unverified or untrained the run
is *drained* and the trainer ends with a checkpoint. Both are left by resuming. Repeating a command changes nothing.
"""

from shoal.coordinator import ledger
from shoal.coordinator.batching import steps
from shoal.coordinator.rules import trust
from shoal.coordinator.run import Run
from shoal.coordinator.store.database import Connection, Transaction
from shoal.coordinator.store.rows import update
from shoal.coordinator.store.tables import WorkerRow
from shoal.coordinator.work import verdicts
from shoal.coordinator.workers import find_worker, save_trust, trust_record
from shoal.errors import RefusedError
from shoal.protocol import api


def set_state(connection: Connection, run: Run, state: api.OwnerState) -> api.RunStateAnswer:
    before = steps.run_state(connection, run)
    if before == "finished":
        raise RefusedError("finished", "The run is finished.", hint="Raise run.steps to go on.", status=409)
    if steps.wanted_state(connection) != state:
        steps.set_wanted_state(connection, state)
        ledger.append(connection, run.keypair, run.clock(), "run_state", state=state)
    return state_answer(connection, run)


def state_answer(connection: Connection, run: Run) -> api.RunStateAnswer:
    now = steps.read_run(connection, run)
    return api.RunStateAnswer(
        run_state=now.state,
        step=now.step,
        newest_version=now.newest_version,
        leases_outstanding=steps.leases_outstanding(connection),
        submissions_pending=steps.submissions_pending(connection),
    )


def ban(connection: Transaction, run: Run, body: api.BanBody) -> WorkerRow:
    """As a proof of cheating does: stake slashed, unconsumed work withdrawn."""
    worker = _require_known(connection, body.worker)
    if worker.state == "banned":
        return worker
    return verdicts.ban(connection, run, worker, f"by the owner: {body.reason}", by="owner")


def unban(connection: Transaction, run: Run, body: api.BanBody) -> WorkerRow:
    """Back to probation with an empty record; what was slashed stays slashed."""
    worker = _require_known(connection, body.worker)
    if worker.state != "banned":
        raise RefusedError("not_banned", f"This key is {worker.state}, not banned.", status=409)
    worker = save_trust(connection, worker, trust.after(trust_record(worker), "unbanned", run.config.trust))
    ledger.append(connection, run.keypair, run.clock(), "unban", worker=body.worker, reason=body.reason)
    if worker.accepted:
        connection.on_commit(lambda: run.presence.proven.add(body.worker))
    return update(connection, worker, reason="", banned_at=None, drift=0.0, drift_sums="[]")


def _require_known(connection: Connection, key: str) -> WorkerRow:
    worker = find_worker(connection, key)
    if worker is None:
        hint = "`shoal run status` shows the workers of the run."
        raise RefusedError("unknown_worker", "No worker with this key has registered.", hint=hint, status=404)
    return worker
