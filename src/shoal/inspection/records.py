"""One completion with everything that is known of it: the worker's claims, the validator's verdict, its place in the run.

Rewards are the validator's where there is a verdict, else the worker's claim, and a record says which. Its age is how many
versions the trainer had gone on when the completion entered a batch, or will have at least if it waits.
"""

from dataclasses import dataclass, replace
from typing import Any

from shoal.errors import ShoalError
from shoal.protocol import api
from shoal.protocol.rollouts import Rollout, RolloutHeader
from shoal.protocol.steps import group_name
from shoal.tasks import Task
from shoal.tasks.workload import Workload


class InspectionError(ShoalError):
    """Nothing that could be shown."""

    code = "inspection"
    permanent = True


@dataclass(frozen=True)
class Margins:
    """How far the sampled tokens of one completion are from winning under a policy; 0 for a token that wins."""

    worst: float
    differing: int
    tokens: int


@dataclass(frozen=True)
class Record:
    header: RolloutHeader
    rollout: Rollout
    prompt: str
    text: str
    state: str = "recorded"
    """`recorded` without a run; else what became of it: waiting, accepted, no_signal, consumed, expired, withdrawn, rejected."""
    batch_step: int | None = None
    verdict: api.VerdictBody | None = None
    worker_name: str = ""
    why: str = ""
    margins: Margins | None = None

    @property
    def group_id(self) -> str:
        return group_name(self.header.step_id, self.header.slot, self.rollout.group)

    @property
    def age(self) -> int:
        step = self.header.step if self.batch_step is None else self.batch_step
        return step - self.header.policy_version

    @property
    def verified(self) -> bool:
        return self._group_verdict is not None

    @property
    def reward(self) -> float:
        return self._group_verdict.rewards[self.rollout.sample] if self._group_verdict else self.rollout.reward

    @property
    def task_reward(self) -> float:
        return (
            self._group_verdict.task_rewards[self.rollout.sample] if self._group_verdict else self.rollout.task_reward
        )

    @property
    def length(self) -> int:
        return len(self.rollout.output_tokens)

    @property
    def truncated(self) -> bool:
        return self.rollout.finish_reason == "length"

    @property
    def _group_verdict(self) -> api.GroupVerdict | None:
        groups = self.verdict.groups if self.verdict else ()
        found = next((group for group in groups if group.group == self.rollout.group), None)
        return found if found is not None and self.rollout.sample < len(found.rewards) else None


def explain(record: Record, workload: Workload) -> Record:
    """Says why the completion earned its task reward, by asking the verifier again."""
    return replace(record, why=why_rewarded(record.rollout, workload))


def task_of(rollout: Rollout, workload: Workload) -> Task | None:
    import pyarrow.compute as pc

    index = pc.index(workload.tasks.train.table.column("problem_id"), rollout.task_id).as_py()
    return None if index < 0 else workload.tasks.train[index]


def why_rewarded(rollout: Rollout, workload: Workload) -> str:
    task = task_of(rollout, workload)
    if task is None:
        return "its task is not in the task set of the run"
    return workload.reward(task, rollout.target_length, rollout.output_tokens).why


def as_json(record: Record) -> dict[str, Any]:
    """A flat record for other programs; what is not known is null."""
    header, rollout, verdict = record.header, record.rollout, record.verdict
    metrics = verdict.metrics if verdict and verdict.audited_groups else None
    return {
        "run_id": header.run_id,
        "group_id": record.group_id,
        "sample": rollout.sample,
        "step": header.step,
        "slot": header.slot,
        "policy_version": header.policy_version,
        "batch_step": record.batch_step,
        "age": record.age,
        "state": record.state,
        "worker": header.worker_key,
        "worker_name": record.worker_name,
        "task_id": rollout.task_id,
        "prompt": record.prompt,
        "completion": record.text,
        "tokens": record.length,
        "target_length": rollout.target_length,
        "finish_reason": rollout.finish_reason,
        "task_reward": record.task_reward,
        "reward": record.reward,
        "reward_from": "validator" if record.verified else "worker",
        "why": record.why or None,
        "verdict": None if verdict is None else ("accepted" if verdict.accepted else "rejected"),
        "reasons": [] if verdict is None else [str(reason) for reason in verdict.reasons],
        "detail": verdict.detail if verdict else "",
        "submission_margin_max": metrics.margin_max if metrics else None,
        "submission_rounding_flips": metrics.rounding_flips if metrics else None,
        "submission_tokens": metrics.tokens if metrics else None,
        "margin_max": record.margins.worst if record.margins else None,
        "tokens_differing": record.margins.differing if record.margins else None,
    }
