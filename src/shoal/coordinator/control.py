"""The owner's hand on a run: pause, resume, drain, ban, unban. Each runs inside one transaction and stands in the ledger.

*Paused*: no new leases, everything else goes on. *Draining*: no new leases; once nothing is leased, unjudged or untrained the run
is *drained* and the trainer ends with a checkpoint. Both are left by resuming. Repeating a command changes nothing.
"""

from shoal.coordinator import ledger, steps, verdicts
from shoal.coordinator.context import Context
from shoal.coordinator.rules import trust
from shoal.coordinator.store.database import Connection, Row
from shoal.coordinator.workers import save_trust, trust_record
from shoal.errors import RefusedError
from shoal.protocol import api


def set_state(connection: Connection, context: Context, state: api.OwnerState) -> api.RunStateAnswer:
    before = steps.run_state(connection, context)
    if before == "finished":
        raise RefusedError("finished", "The run is finished.", hint="Raise run.steps to go on.", status=409)
    if steps.wanted_state(connection) != state:
        steps.set_wanted_state(connection, state)
        ledger.append(connection, context.keypair, context.clock(), "run_state", state=state)
    return state_answer(connection, context)


def state_answer(connection: Connection, context: Context) -> api.RunStateAnswer:
    return api.RunStateAnswer(
        run_state=steps.run_state(connection, context),
        step=steps.current_step(connection),
        newest_version=steps.newest_version(connection),
        leases_outstanding=steps.leases_outstanding(connection),
        submissions_unjudged=steps.submissions_unjudged(connection),
    )


def ban(connection: Connection, context: Context, body: api.BanBody) -> Row:
    """What a proof of cheating does, on the owner's word: stake slashed, unconsumed work withdrawn."""
    if _worker(connection, body.worker)["state"] != "banned":
        verdicts.ban(connection, context, body.worker, f"by the owner: {body.reason}")
    return _worker(connection, body.worker)


def unban(connection: Connection, context: Context, body: api.BanBody) -> Row:
    """Back to probation with an empty record; what was slashed stays slashed."""
    worker = _worker(connection, body.worker)
    if worker["state"] != "banned":
        raise RefusedError("not_banned", f"This key is {worker['state']}, not banned.", status=409)
    save_trust(connection, body.worker, trust.after(trust_record(worker), "unbanned", context.config.trust))
    connection.execute("UPDATE workers SET reason='', banned_at=NULL, drift=0 WHERE key=?", (body.worker,))
    ledger.append(connection, context.keypair, context.clock(), "unban", worker=body.worker, reason=body.reason)
    return _worker(connection, body.worker)


def _worker(connection: Connection, key: str) -> Row:
    row: Row | None = connection.execute("SELECT * FROM workers WHERE key=?", (key,)).fetchone()
    if row is None:
        hint = "`shoal run status` shows who works here."
        raise RefusedError("unknown_worker", "No worker with this key has registered.", hint=hint, status=404)
    return row
