"""The steps of a run: the current one, its batch once it is formed, and the versions that follow.

Runs inside one transaction of the store. `rules.batches` decides which groups make a batch and which expire.
"""

import json
from collections import Counter
from dataclasses import dataclass, replace
from statistics import fmean
from typing import cast

from shoal.coordinator import ledger
from shoal.coordinator.batching.recalls import groups_in_audit
from shoal.coordinator.ledger import secrets
from shoal.coordinator.rules import batches, runs
from shoal.coordinator.run import Run
from shoal.coordinator.states import FILLING, UNDECIDED, BatchState, GroupState, LeaseState, SubmissionState, one_of
from shoal.coordinator.store import meta
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import find, insert, number, query, select
from shoal.coordinator.store.tables import BatchRow, EvaluationRow, GroupRow, SubmissionRow, VersionRow
from shoal.coordinator.work import slots
from shoal.coordinator.work.audits import audit_in_full
from shoal.errors import RefusedError
from shoal.protocol import api
from shoal.protocol.steps import StepId

EPOCH_AND_ATTEMPT = (
    "(SELECT value FROM meta WHERE name='epoch') AS epoch, (SELECT value FROM meta WHERE name='attempt') AS attempt"
)
GROUP_VIEW = "step, slot, number, group_id, policy_version, deferred, worker, logprobs_verified AS audited"


@dataclass(frozen=True)
class RunNow:
    state: api.RunState
    step: int
    newest_version: int
    epoch: int = 0
    attempt: int = 0

    @property
    def step_id(self) -> StepId:
        return StepId(self.epoch, self.step, self.attempt)


@dataclass(frozen=True)
class _Progress:
    last_step: int | None
    newest: int | None
    wanted: str | None
    epoch: str | None
    attempt: str | None


@dataclass(frozen=True)
class _Current:
    step: int | None
    epoch: str | None
    attempt: str | None


@dataclass(frozen=True)
class _Slot:
    slot: int


@dataclass(frozen=True)
class _Dropped:
    state: GroupState
    n: int


@dataclass(frozen=True)
class _Rewards:
    rewards: str
    task_rewards: str


@dataclass(frozen=True)
class _BatchGroup:
    group_id: str
    submission_id: str
    digest: str
    number: int
    policy_version: int
    rewards: str
    task_rewards: str
    logprobs_verified: bool


def read_run(connection: Connection, run: Run) -> RunNow:
    """The state of the run, its current step and its newest version."""
    (now,) = query(
        connection,
        _Progress,
        "SELECT (SELECT MAX(step) FROM batches) AS last_step, (SELECT MAX(version) FROM versions) AS newest,"
        " (SELECT value FROM meta WHERE name='run_state') AS wanted,"
        f" {EPOCH_AND_ATTEMPT}",
    )
    step = 0 if now.last_step is None else now.last_step + 1
    newest = -1 if now.newest is None else now.newest
    wanted = cast(api.OwnerState, now.wanted or "running")
    draining = wanted == "draining"
    view = runs.RunView(
        wanted=wanted,
        steps=run.config.run.steps,
        step=step,
        newest_version=newest,
        leases_outstanding=leases_outstanding(connection) if draining else 0,
        submissions_pending=submissions_pending(connection) if draining else 0,
    )
    return RunNow(runs.run_state(view), step, newest, int(now.epoch or 0), int(now.attempt or 0))


def run_state(connection: Connection, run: Run) -> api.RunState:
    return read_run(connection, run).state


def current_step(connection: Connection) -> int:
    return number(connection, "SELECT MAX(step) + 1 AS n FROM batches")


def recorded_batches(connection: Connection) -> int:
    """Steps whose batch is final, from the first one on."""
    return number(connection, f"SELECT MAX(step) + 1 AS n FROM batches WHERE state='{BatchState.RECORDED}'")


def current_id(connection: Connection) -> StepId:
    """The current step with its epoch and attempt: its secret draws the audits of files that arrive now."""
    sql = f"SELECT (SELECT MAX(step) + 1 FROM batches) AS step, {EPOCH_AND_ATTEMPT}"
    (now,) = query(connection, _Current, sql)
    return StepId(int(now.epoch or 0), now.step or 0, int(now.attempt or 0))


def epoch(connection: Connection) -> int:
    """How often the run was rewound."""
    return int(meta.read(connection, "epoch") or 0)


def require_epoch(connection: Connection, given: int) -> None:
    """A trainer that does not know of a rewind must neither train nor publish."""
    if given != (now := epoch(connection)):
        hint = "The trainer takes up the new epoch by itself when it starts again."
        raise RefusedError("rewound", f"The run was rewound: epoch {now} goes on, not {given}.", hint=hint, status=409)


def newest_version(connection: Connection) -> int:
    """−1 before the first."""
    return number(connection, "SELECT MAX(version) + 1 AS n FROM versions") - 1


def wanted_state(connection: Connection) -> api.OwnerState:
    return cast(api.OwnerState, meta.read(connection, "run_state") or "running")


def set_wanted_state(connection: Connection, state: api.OwnerState) -> None:
    meta.write(connection, "run_state", state)


def checkpoints(connection: Connection) -> list[int]:
    """Steps that the trainer may have to begin again from, oldest first; it reports them with every version."""
    return list(json.loads(meta.read(connection, "checkpoints") or "[]"))


def leases_outstanding(connection: Connection) -> int:
    return number(connection, f"SELECT COUNT(*) AS n FROM leases WHERE state='{LeaseState.LEASED}'")


def submissions_pending(connection: Connection) -> int:
    return number(connection, f"SELECT COUNT(*) AS n FROM submissions WHERE state IN {one_of(*UNDECIDED)}")


def step_counts(connection: Connection, run: Run, step: int, of_epoch: int | None = None) -> batches.StepCounts:
    """Of the current epoch, which a caller that knows it may give."""
    per_slot, training = run.descriptor.rollouts.tasks_per_slot, run.config.training
    counted = slots.slot_counts(connection, epoch(connection) if of_epoch is None else of_epoch, step)
    waiting = slots.waiting_groups(connection, batches.oldest_version(step, training), step)
    deferred = sum(row.n for row in waiting if row.step == step and row.deferred)
    return batches.StepCounts(
        useful=sum(row.n for row in waiting) - deferred,
        useful_of_step=sum(row.n for row in waiting if row.step == step) - deferred,
        outstanding_groups=counted.outstanding * per_slot,
        resolved_groups=counted.resolved * per_slot,
        probation_slots=counted.probation,
        deferred=batches.Deferred(
            deferred, counted.deferred_outstanding * per_slot, counted.deferred_resolved * per_slot
        ),
    )


def counts_ahead(connection: Connection, run: Run, step: int, of_epoch: int) -> batches.StepCounts:
    """Of the step after this one, as far as this one's batch leaves it alone."""
    following = step_counts(connection, run, step + 1, of_epoch)
    waiting = slots.waiting_groups(connection, batches.oldest_version(step + 1, run.config.training), step + 1)
    return replace(
        following, useful=following.useful_of_step + sum(row.n for row in waiting if row.step == step and row.deferred)
    )


def step_view(connection: Connection, step: int, counts: batches.StepCounts) -> batches.StepView:
    waiting = query(
        connection,
        batches.GroupView,
        f"SELECT {GROUP_VIEW} FROM groups WHERE state='{GroupState.ACCEPTED}'",
    )
    blocking = query(
        connection,
        _Slot,
        f"SELECT slot FROM slots WHERE epoch=? AND step=? AND state IN {one_of(*FILLING)}"
        " AND deferred=0 AND attempts <= ?",
        (epoch(connection), step, batches.BLOCKING_ATTEMPTS),
    )
    return batches.StepView(step, counts, waiting, [row.slot for row in blocking])


def advance(connection: Connection, run: Run) -> bool:
    """Proposes the batch of the current step if it is complete; groups that are too old for it expire."""
    step, training = current_step(connection), run.config.training
    if step >= run.config.run.steps:
        return False
    counts = step_counts(connection, run, step)
    if not batches.may_be_complete(counts, training):
        return False
    view = step_view(connection, step, counts)
    batch = batches.decide(view, training, run.config.trust)
    if batch is None:
        _audit_surplus(connection, run, view)
        return False
    _propose(connection, run, step, counts, batch)
    return True


def _audit_surplus(connection: Connection, run: Run, view: batches.StepView) -> None:
    """Groups beyond the share of their key are audited, so that a batch never waits for another key. There are some only if the
    share was lowered since they were verified: a claim leaves no more than the share without an audit."""
    groups = {group.group_id for group in batches.surplus(view, run.config.training, run.config.trust)}
    for row in select(connection, SubmissionRow, f"WHERE state='{SubmissionState.DECIDED}'") if groups else ():
        of_file = select(connection, GroupRow, "WHERE submission_id=?", (row.submission_id,))
        if any(group.group_id in groups for group in of_file):
            audit_in_full(connection, run, row)


def _propose(connection: Connection, run: Run, step: int, counts: batches.StepCounts, batch: batches.Batch) -> None:
    waiting = {row.group_id: row for row in select(connection, GroupRow, f"WHERE state='{GroupState.ACCEPTED}'")}
    slots.move_groups(connection, [waiting[group.group_id] for group in batch.expired], GroupState.EXPIRED)
    slots.propose_groups(connection, [waiting[group.group_id] for group in batch.groups], step)
    reward_mean, task_reward_mean = _generated_means(connection, step)
    insert(
        connection,
        BatchRow(
            step=step,
            formed_at=run.clock(),
            groups=len(batch.groups),
            generated=counts.resolved_groups,
            dropped=json.dumps(_dropped_counts(connection, step, len(batch.expired))),
            ages=json.dumps(Counter(step - group.policy_version for group in batch.groups)),
            epoch=epoch(connection),
            useful=counts.useful_of_step,
            reward_mean=reward_mean,
            task_reward_mean=task_reward_mean,
        ),
    )
    slots.close_step(connection, epoch(connection), step)
    secrets.commit_ahead(connection, run, current_id(connection))


def _dropped_counts(connection: Connection, step: int, expired: int) -> dict[str, int]:
    left = one_of(GroupState.ACCEPTED, GroupState.NO_SIGNAL, GroupState.WITHDRAWN)
    sql = f"SELECT state, COUNT(*) AS n FROM groups WHERE epoch=? AND step=? AND state IN {left} GROUP BY state"
    names, values = {GroupState.ACCEPTED: "carried_over"}, (epoch(connection), step)
    counts = {names.get(row.state, row.state.value): row.n for row in query(connection, _Dropped, sql, values)}
    return counts | ({"expired": expired} if expired else {})


def _generated_means(connection: Connection, step: int) -> tuple[float | None, float | None]:
    """Reward and task reward of all samples: those of useful groups say how mixed they are, not how good the policy is."""
    kept = one_of(*(state for state in GroupState if state is not GroupState.WITHDRAWN))
    sql = f"SELECT rewards, task_rewards FROM groups WHERE epoch=? AND step=? AND state IN {kept}"
    rows = query(connection, _Rewards, sql, (epoch(connection), step))
    rewards = [value for row in rows for value in json.loads(row.rewards)]
    return _mean(rewards), _mean([value for row in rows for value in json.loads(row.task_rewards)])


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def batch_record(connection: Connection, step: int) -> api.BatchRecord | None:
    row = find(connection, BatchRow, "WHERE step=?", (step,))
    if row is None or row.state is BatchState.RECALLED:
        return None
    groups = query(
        connection,
        _BatchGroup,
        "SELECT groups.*, submissions.digest AS digest FROM groups JOIN submissions USING (submission_id)"
        f" WHERE batch_step=? AND groups.state IN {one_of(GroupState.PROPOSED, GroupState.CONSUMED)} ORDER BY position",
        (step,),
    )
    return api.BatchRecord(
        epoch=row.epoch,
        step=step,
        state="proposed" if row.state is BatchState.PROPOSED else "recorded",
        attempt=row.attempt,
        groups=[_batch_group(group) for group in groups],
        dropped=json.loads(row.dropped),
        generated_groups=row.generated,
        generated_reward_mean=row.reward_mean,
        generated_task_reward_mean=row.task_reward_mean,
    )


def _batch_group(group: _BatchGroup) -> api.BatchGroup:
    return api.BatchGroup(
        group_id=group.group_id,
        submission_id=group.submission_id,
        digest=group.digest,
        group=group.number,
        policy_version=group.policy_version,
        rewards=json.loads(group.rewards),
        task_rewards=json.loads(group.task_rewards),
        logprobs_verified=group.logprobs_verified,
    )


def missing(connection: Connection, run: Run, step: int) -> str:
    """What a batch that is not formed waits for."""
    if audits := groups_in_audit(connection, step):
        return f"the audit of {audits} groups of step {step}, whose batch was recalled"
    counts = step_counts(connection, run, step)
    state = run_state(connection, run)
    note = "" if state == "running" else f"; the run is {state}"
    return (
        f"{counts.useful} of {run.config.training.groups_per_step} useful groups of step {step}"
        f" ({counts.outstanding_groups} on their way, {run.presence.count()} workers present{note})"
    )


def publish(connection: Connection, run: Run, body: api.VersionBody) -> None:
    """Records a version once; within an epoch a number never gets other bytes."""
    require_epoch(connection, body.epoch)
    if body.checkpoints is not None:
        meta.write(connection, "checkpoints", json.dumps(sorted(body.checkpoints)))
    known = find(connection, VersionRow, "WHERE version=?", (body.version,))
    if known is None:
        _record_version(connection, run, body)
    elif (known.manifest_digest, known.weights_digest) != (body.manifest_digest, body.weights_digest):
        raise RefusedError("version_conflict", f"Version {body.version} was published with other weights.", status=409)


def _record_version(connection: Connection, run: Run, body: api.VersionBody) -> None:
    expected, now = newest_version(connection) + 1, run.clock()
    if body.version != expected or body.version > recorded_batches(connection):
        raise RefusedError("version_order", f"Version {expected} is the next one, not {body.version}.", status=409)
    sizes = (body.bytes_total, now, json.dumps(body.report), body.epoch)
    insert(connection, VersionRow(body.version, body.manifest_digest, body.weights_digest, *sizes))
    ledger.append(
        connection,
        run.keypair,
        now,
        "version",
        epoch=body.epoch,
        version=body.version,
        manifest=body.manifest_digest,
        weights=body.weights_digest,
    )


def record_evaluation(connection: Connection, run: Run, body: api.EvaluationBody) -> None:
    """One of a version that a rewind voided meanwhile is dropped: its number means other weights now."""
    version = find(connection, VersionRow, "WHERE version=?", (body.version,))
    if body.manifest_digest and (version is None or version.manifest_digest != body.manifest_digest):
        return
    insert(connection, EvaluationRow(body.version, run.clock(), body.model_dump_json()), unless_known=True)
