"""The row of steps: which one is current, what is known about it, its batch once it is formed, and the versions that follow.

Runs inside one transaction of the store; which groups make a batch is decided by `batches`.
"""

import json
from collections import Counter

from shoal.coordinator import ledger, slots
from shoal.coordinator.context import Context
from shoal.coordinator.rules import batches
from shoal.coordinator.store.database import Connection
from shoal.errors import RefusedError
from shoal.protocol import api
from shoal.protocol.assignment import step_secret


def current_step(connection: Connection) -> int:
    row = connection.execute("SELECT MAX(step) AS last FROM batches").fetchone()
    return 0 if row["last"] is None else int(row["last"]) + 1


def newest_version(connection: Connection) -> int:
    row = connection.execute("SELECT MAX(version) AS newest FROM versions").fetchone()
    return -1 if row["newest"] is None else int(row["newest"])


def run_state(connection: Connection, context: Context) -> api.RunState:
    """What the owner asked for, and whether that has come about."""
    row = connection.execute(
        "SELECT (SELECT MAX(version) FROM versions) AS newest, (SELECT value FROM meta WHERE name='run_state') AS wanted"
    ).fetchone()
    if row["newest"] is not None and row["newest"] >= context.config.run.steps:
        return "finished"
    wanted: api.OwnerState = row["wanted"] or "running"
    return "drained" if wanted == "draining" and _is_drained(connection) else wanted


def wanted_state(connection: Connection) -> api.OwnerState:
    row = connection.execute("SELECT value FROM meta WHERE name='run_state'").fetchone()
    return row["value"] if row else "running"


def oldest_checkpoint(connection: Connection) -> int:
    """The step that the trainer may have to begin again from; it tells with every version."""
    row = connection.execute("SELECT value FROM meta WHERE name='oldest_checkpoint'").fetchone()
    return int(row["value"]) if row else 0


def leases_outstanding(connection: Connection) -> int:
    return int(connection.execute("SELECT COUNT(*) AS n FROM leases WHERE state='leased'").fetchone()["n"])


def submissions_unjudged(connection: Connection) -> int:
    row = connection.execute("SELECT COUNT(*) AS n FROM submissions WHERE state IN ('pending','claimed')").fetchone()
    return int(row["n"])


def _is_drained(connection: Connection) -> bool:
    """Nothing is leased, unjudged, or in a batch that no version follows from yet."""
    return (
        newest_version(connection) == current_step(connection)
        and not leases_outstanding(connection)
        and not submissions_unjudged(connection)
    )


def step_counts(connection: Connection, context: Context, step: int) -> batches.StepCounts:
    per_slot = context.descriptor.rollouts.tasks_per_slot
    counted = slots.slot_counts(connection, step)
    useful, of_step = slots.waiting_groups(connection, step, step - context.config.training.async_level)
    return batches.StepCounts(
        useful, of_step, counted.outstanding * per_slot, counted.judged * per_slot, counted.unproven
    )


def step_view(connection: Connection, context: Context, step: int) -> batches.StepView:
    waiting = [
        batches.GroupView(row["step"], row["slot"], row["number"], row["group_id"], row["policy_version"])
        for row in connection.execute(
            "SELECT step, slot, number, group_id, policy_version FROM groups WHERE state='accepted'"
        )
    ]
    active = connection.execute(
        "SELECT slot, attempts FROM slots WHERE step=? AND state IN ('leased','submitted')", (step,)
    ).fetchall()
    judged = connection.execute(
        "SELECT COUNT(*) AS n FROM slots WHERE step=? AND state='resolved'", (step,)
    ).fetchone()["n"]
    per_slot = context.descriptor.rollouts.tasks_per_slot
    return batches.StepView(
        step=step,
        waiting=waiting,
        blocking_slots=[row["slot"] for row in active if row["attempts"] == 1],
        outstanding_groups=len(active) * per_slot,
        judged_groups=judged * per_slot,
    )


def advance(connection: Connection, context: Context) -> bool:
    """Forms the batch of the current step if it is complete; expires groups that no batch may hold any more."""
    step = current_step(connection)
    if step >= context.config.run.steps:
        return False
    if not batches.may_be_complete(step_counts(connection, context, step), context.config.training):
        return False
    view = step_view(connection, context, step)
    decision = batches.decide(view, context.config.training)
    if decision.batch is None:
        return False
    oldest = step - context.config.training.async_level
    expired = slots.mark_groups(connection, "policy_version < ?", (oldest,), "expired")
    connection.executemany(
        "UPDATE groups SET batch_step=?, position=? WHERE group_id=?",
        [(step, position, group_id) for position, group_id in enumerate(decision.batch)],
    )
    slots.mark_groups(connection, "batch_step=?", (step,), "consumed")
    dropped = _dropped_counts(connection, step, expired)
    now = context.clock()
    chosen = set(decision.batch)
    ages = Counter(step - group.policy_version for group in view.waiting if group.group_id in chosen)
    connection.execute(
        "INSERT INTO batches VALUES (?,?,?,?,?,?)",
        (step, now, len(chosen), view.judged_groups, json.dumps(dropped), json.dumps(ages)),
    )
    slots.close_step(connection, step)
    ledger.append(
        connection,
        context.keypair,
        now,
        "batch",
        step=step,
        groups=list(decision.batch),
        step_secret=step_secret(context.secret, step).hex(),
    )
    return True


def _dropped_counts(connection: Connection, step: int, expired: int) -> dict[str, int]:
    rows = connection.execute(
        "SELECT state, COUNT(*) AS n FROM groups WHERE step=? AND state IN ('accepted','no_signal','withdrawn')"
        " GROUP BY state",
        (step,),
    )
    names = {"accepted": "carried_over"}
    counts = {names.get(row["state"], row["state"]): int(row["n"]) for row in rows}
    if expired:
        counts["expired"] = expired
    return counts


def batch_record(connection: Connection, step: int) -> api.BatchRecord | None:
    row = connection.execute("SELECT * FROM batches WHERE step=?", (step,)).fetchone()
    if row is None:
        return None
    groups = connection.execute(
        "SELECT groups.*, submissions.digest AS digest FROM groups JOIN submissions USING (submission_id)"
        " WHERE batch_step=? ORDER BY position",
        (step,),
    )
    return api.BatchRecord(
        step=step,
        groups=[
            api.BatchGroup(
                group_id=group["group_id"],
                submission_id=group["submission_id"],
                digest=group["digest"],
                group=group["number"],
                policy_version=group["policy_version"],
                rewards=json.loads(group["rewards"]),
                task_rewards=json.loads(group["task_rewards"]),
                logprobs_verified=bool(group["logprobs_verified"]),
            )
            for group in groups
        ],
        dropped=json.loads(row["dropped"]),
        generated_groups=row["generated"],
        formed_at=row["formed_at"],
    )


def missing(connection: Connection, context: Context, step: int) -> str:
    """Whom a batch that is not formed waits for."""
    counts = step_counts(connection, context, step)
    workers = sum(context.is_present(key) for key in list(context.presence))
    state = run_state(connection, context)
    note = "" if state == "running" else f"; the run is {state}"
    return (
        f"{counts.useful} of {context.config.training.groups_per_step} useful groups of step {step}"
        f" ({counts.outstanding_groups} on their way, {workers} workers present{note})"
    )


def publish(connection: Connection, context: Context, key: str, body: api.VersionBody) -> str:
    """Records a version once; a number never gets other bytes. Returns the ledger head that the signed head must carry."""
    context.require_role(key, "trainer")
    if body.oldest_checkpoint is not None:
        _remember(connection, "oldest_checkpoint", str(body.oldest_checkpoint))
    known = connection.execute("SELECT * FROM versions WHERE version=?", (body.version,)).fetchone()
    if known is not None:
        if (known["manifest_digest"], known["weights_digest"]) != (body.manifest_digest, body.weights_digest):
            raise RefusedError(
                "version_conflict", f"Version {body.version} was published with other weights.", status=409
            )
        return ledger.head(connection)[1]
    expected = newest_version(connection) + 1
    if body.version != expected or body.version > current_step(connection):
        raise RefusedError("version_order", f"Version {expected} is the next one, not {body.version}.", status=409)
    now = context.clock()
    connection.execute(
        "INSERT INTO versions VALUES (?,?,?,?,?,?)",
        (body.version, body.manifest_digest, body.weights_digest, body.bytes_total, now, json.dumps(body.report)),
    )
    return ledger.append(
        connection,
        context.keypair,
        now,
        "version",
        version=body.version,
        manifest=body.manifest_digest,
        weights=body.weights_digest,
    )


def _remember(connection: Connection, name: str, value: str) -> None:
    connection.execute(
        "INSERT INTO meta VALUES (?,?) ON CONFLICT (name) DO UPDATE SET value=excluded.value", (name, value)
    )


def set_wanted_state(connection: Connection, state: api.OwnerState) -> None:
    _remember(connection, "run_state", state)


def record_evaluation(connection: Connection, context: Context, key: str, body: api.EvaluationBody) -> None:
    context.require_role(key, "evaluator")
    connection.execute(
        "INSERT INTO evaluations VALUES (?,?,?) ON CONFLICT (version) DO NOTHING",
        (body.version, context.clock(), body.model_dump_json()),
    )
