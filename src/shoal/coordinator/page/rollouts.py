"""The owner's way from a step to a token: groups and submissions of a step, and the completions of a group. Reads only.

Texts come from a reader that the process is given: decoding needs the run's tokenizer and, for the reasons, its tasks.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.coordinator.page.contributor import in_words
from shoal.coordinator.page.curves import with_interval
from shoal.coordinator.rules import trust
from shoal.coordinator.rules.runs import RunClock
from shoal.coordinator.run import Run
from shoal.coordinator.store import meta, records
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import find, query, select
from shoal.coordinator.store.tables import GroupRow, VersionRow
from shoal.coordinator.views import worker_view
from shoal.coordinator.workers import delivery_record, find_worker, trust_record
from shoal.errors import RefusedError
from shoal.protocol.page_views import (
    GroupAddress,
    OwnerCompletion,
    OwnerGroup,
    OwnerGroupView,
    OwnerStep,
    OwnerSubmission,
    OwnerWorker,
)
from shoal.protocol.steps import group_name, step_named

SHOWN_GROUPS = 500
SHOWN_SUBMISSIONS = 200


@dataclass(frozen=True)
class GroupText:
    """A group as its file has it."""

    task_id: str
    completions: Sequence[OwnerCompletion]
    """With the worker's own claims."""
    overlay: str


class RolloutReader(Protocol):
    def read(self, submission_id: str, number: int) -> GroupText:
        """The completions of one group of a rollout file, or a refusal in words."""
        ...


@dataclass(frozen=True)
class _File:
    submission_id: str
    step: int
    slot: int
    worker: str
    policy_version: int
    state: str
    received_at: float
    audit_rate: float
    verdict: str | None


FILES = (
    "SELECT submission_id, leases.step AS step, leases.slot AS slot, submissions.worker AS worker, policy_version,"
    " submissions.state AS state, received_at, audit_rate, verdict FROM submissions JOIN leases USING (lease_id)"
)


def step_view(connection: Connection, step: int) -> OwnerStep:
    names, clock = records.worker_names(connection), meta.run_clock(connection)
    rows = select(
        connection,
        GroupRow,
        "WHERE batch_step=? OR step=? ORDER BY step, slot, number LIMIT ?",
        (step, step, SHOWN_GROUPS),
    )
    files = query(connection, _File, f"{FILES} WHERE leases.step=? ORDER BY slot LIMIT ?", (step, SHOWN_SUBMISSIONS))
    version = find(connection, VersionRow, "WHERE version=?", (step + 1,))
    report = with_interval(json.loads(version.report)) if version else {}
    return OwnerStep(
        step=step,
        groups=[_group(row, names) for row in rows],
        submissions=[_submission(row, names, clock) for row in files],
        metrics=report,
    )


def group_view(connection: Connection, address: GroupAddress) -> Callable[[RolloutReader], OwnerGroupView]:
    """What the store knows of a group; the texts are read afterwards, outside of the transaction."""
    names, clock = records.worker_names(connection), meta.run_clock(connection)
    step = step_named(address.step)
    group_id = group_name(step, address.slot, address.number)
    row = find(connection, GroupRow, "WHERE group_id=?", (group_id,))
    if row is not None:
        files = query(connection, _File, f"{FILES} WHERE submission_id=?", (row.submission_id,))
    else:
        of_slot = "WHERE leases.epoch=? AND leases.step=? AND leases.slot=? ORDER BY received_at"
        files = query(connection, _File, f"{FILES} {of_slot}", (step.epoch, step.step, address.slot))
    if not files:
        raise RefusedError("unknown_group", f"No file of group {group_id} has arrived.", status=404)
    file = files[-1]

    def with_texts(reader: RolloutReader) -> OwnerGroupView:
        text = reader.read(file.submission_id, address.number)
        return OwnerGroupView(
            group_id=group_id,
            task_id=text.task_id,
            worker=file.worker,
            worker_name=names.get(file.worker, ""),
            policy_version=file.policy_version,
            age=(step.step if row is None or row.batch_step is None else row.batch_step) - file.policy_version,
            state=row.state if row is not None else "rejected" if file.state == "decided" else "waiting",
            verdict=_submission(file, names, clock),
            completions=_with_rewards(text.completions, row),
            overlay=text.overlay,
        )

    return with_texts


def _with_rewards(completions: Sequence[OwnerCompletion], row: GroupRow | None) -> list[OwnerCompletion]:
    """The validator's rewards where there is a verdict, else the worker's claims."""
    rewards, task_rewards = (json.loads(row.rewards), json.loads(row.task_rewards)) if row is not None else ([], [])
    return [
        one.model_copy(
            update={"reward": rewards[one.sample], "task_reward": task_rewards[one.sample], "reward_from": "validator"}
        )
        if one.sample < min(len(rewards), len(task_rewards))
        else one
        for one in completions
    ]


def worker_details(connection: Connection, run: Run, key: str) -> OwnerWorker:
    """What only the owner may know of a key."""
    row = find_worker(connection, key)
    if row is None:
        raise RefusedError("unknown_worker", "No worker with this key has registered.", status=404)
    names, clock = records.worker_names(connection), meta.run_clock(connection)
    files = query(
        connection,
        _File,
        f"{FILES} WHERE submissions.worker=? ORDER BY received_at DESC LIMIT ?",
        (key, SHOWN_SUBMISSIONS),
    )
    deliveries = delivery_record(row)
    return OwnerWorker(
        worker=worker_view(connection, run, row),
        reason=row.reason,
        audit_rate=trust.audit_rate(trust_record(row), run.config.trust),
        drift=row.drift,
        clean_audits=row.clean_audits,
        anomalies=row.anomalies,
        missed_share=deliveries.missed_share,
        work_s=deliveries.work_s,
        submissions=[_submission(file, names, clock) for file in files],
    )


def _group(row: GroupRow, names: dict[str, str]) -> OwnerGroup:
    return OwnerGroup(
        group_id=row.group_id,
        slot=row.slot,
        number=row.number,
        worker=row.worker,
        worker_name=names.get(row.worker, ""),
        policy_version=row.policy_version,
        state=row.state,
        batch_step=row.batch_step,
        tokens=row.tokens,
        rewards=json.loads(row.rewards),
        task_rewards=json.loads(row.task_rewards),
        deferred=row.deferred,
    )


def _submission(file: _File, names: dict[str, str], clock: RunClock) -> OwnerSubmission:
    verdict = json.loads(file.verdict or "{}")
    return OwnerSubmission(
        submission_id=file.submission_id,
        step=file.step,
        slot=file.slot,
        worker=file.worker,
        worker_name=names.get(file.worker, ""),
        policy_version=file.policy_version,
        state=file.state,
        at_s=round(clock.at_s(file.received_at), 1),
        accepted=verdict.get("accepted"),
        audited=bool(verdict.get("audited_groups")),
        audit_rate=file.audit_rate,
        reasons=verdict.get("reasons", []),
        words=in_words(file.state, file.verdict)[1],
        detail=verdict.get("detail", ""),
        seconds=verdict.get("seconds", 0.0),
        metrics=verdict.get("metrics", {}),
    )
