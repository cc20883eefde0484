"""An honest submission of the tiny run, and ways to tell one lie in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shoal.files import digest_bytes
from shoal.policy.engine import Engine, GenerationRequest
from shoal.policy.episodes import play_all
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.rollouts import Rollout, RolloutHeader, write_rollouts
from shoal.worker import Worker
from support.samples import NUMERICS_CLASS
from support.tiny_run import WORKER, TinyRun, make_lease, replaced

SLOT = 1
STOPPED_ROW = 4
"""Ends with an end token after a few tokens; row 0 runs to the limit."""
FULL_ROW = 0


@dataclass(frozen=True)
class Submission:
    lease: api.Lease
    header: RolloutHeader
    rollouts: list[Rollout]

    @cached_property
    def data(self) -> bytes:
        return write_rollouts(self.header, self.rollouts)

    def claim(self, *, audit_groups: Sequence[int] = (0, 1), numerics_class: str = "") -> api.Claim:
        return api.Claim(
            claim_id="claim-00000001",
            submission_id="submission-00000001",
            worker_key=WORKER.public,
            digest=digest_bytes(self.data),
            lease=self.lease,
            audit_groups=list(audit_groups),
            numerics_class=numerics_class,
        )

    def with_header(self, **fields: object) -> "Submission":
        return replace(self, header=self.header.model_copy(update=fields))

    def with_row(self, index: int, **fields: Any) -> "Submission":
        return self.changed(index, lambda rollout: replace(rollout, **fields))

    def changed(self, index: int, change: Callable[[Rollout], Rollout]) -> "Submission":
        """With one row changed. A plain completion of another length stays one segment."""

        def fitting(row: Rollout) -> Rollout:
            new = change(row)
            is_plain = len(row.segment_lengths) == 1 and new.segment_lengths == row.segment_lengths
            return replace(new, segment_lengths=[len(new.output_tokens)]) if is_plain else new

        return replace(self, rollouts=replaced(self.rollouts, index, fitting))


def submit(tiny_run: TinyRun, *, kind: type[Worker] = Worker, slot: int = SLOT, version: int = 0) -> Submission:
    """What a worker of this kind would upload for a lease."""
    worker = kind(
        tiny_run.joined(tiny_run.weights(0, 1)),
        CoordinatorClient("http://coordinator", WORKER),
        tiny_run.new_engine(),
        name="worker",
    )
    lease = make_lease(slot, version=version)
    return Submission(lease, header_for(lease), generated(worker, lease))


def generated(worker: Worker, lease: api.Lease) -> list[Rollout]:
    """The samples of one slot as the worker would upload them."""
    slot = worker.prepare(lease)
    worker.engine.load(slot.weights)
    rollouts = worker.joined.descriptor.rollouts
    requests = [GenerationRequest(item.prompt_tokens, item.seed, rollouts.max_new_tokens) for item in slot.items]
    episodes = [worker._episode(slot, at) for at in range(len(slot.items))]
    made = play_all(worker.engine, requests, episodes, temperature=rollouts.temperature)
    slot.completions = dict(enumerate(made))
    return worker.rollouts(slot)


def header_for(lease: api.Lease) -> RolloutHeader:
    return RolloutHeader(
        run_id="run-1",
        step=lease.step,
        slot=lease.slot,
        lease_id=lease.lease_id,
        worker_key=WORKER.public,
        policy_version=lease.policy_version,
        manifest_digest=lease.manifest_digest,
        numerics_class=NUMERICS_CLASS,
    )


def resampled(submission: Submission, tiny_run: TinyRun, engine: Engine, temperature: float = 1.0) -> Submission:
    """The same slot, sampled by another engine or at another temperature, and otherwise consistent."""
    items = tiny_run.workload.items(bytes.fromhex(submission.lease.slot_seed))
    limit = tiny_run.workload.descriptor.rollouts.max_new_tokens
    completions = engine.generate(
        [GenerationRequest(item.prompt_tokens, item.seed, limit) for item in items], temperature=temperature
    )
    rollouts = []
    for rollout, item, completion in zip(submission.rollouts, items, completions, strict=True):
        reward = tiny_run.workload.reward(item.task, item.target_length, completion.tokens)
        rollouts.append(
            replace(
                rollout,
                output_tokens=completion.tokens,
                segment_lengths=[len(completion.tokens)],
                output_logprobs=completion.logprobs,
                finish_reason=completion.finish_reason,
                proofs=completion.proofs,
                task_reward=reward.task_reward,
                length_penalty=reward.length_penalty,
                reward=reward.total,
            )
        )
    return replace(submission, rollouts=rollouts)
