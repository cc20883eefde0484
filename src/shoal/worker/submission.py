"""What a finished slot becomes: rollouts with the worker's own rewards, and the file that is uploaded."""

from collections.abc import Callable, Sequence

from shoal.policy.engine import Completion
from shoal.protocol import api
from shoal.protocol.rollouts import Rollout, RolloutHeader, write_rollouts
from shoal.tasks.workload import Reward, WorkItem, Workload
from shoal.worker.slots import Slot

AsRollout = Callable[[WorkItem, Completion, Reward], Rollout]


def as_rollout(item: WorkItem, completion: Completion, reward: Reward) -> Rollout:
    return Rollout(
        task_id=item.task.problem_id,
        group=item.group,
        sample=item.sample,
        input_tokens=list(item.prompt_tokens),
        output_tokens=completion.tokens,
        segment_lengths=completion.segment_lengths or [len(completion.tokens)],
        output_logprobs=completion.logprobs,
        target_length=item.target_length,
        task_reward=reward.task_reward,
        length_penalty=reward.length_penalty,
        reward=reward.total,
        finish_reason=completion.finish_reason,
        proofs=completion.proofs,
    )


def rollouts_of(slot: Slot, workload: Workload, as_rollout: AsRollout = as_rollout) -> list[Rollout]:
    """Every sample of a finished slot with its reward."""
    items = slot.items
    plain = [at for at in range(len(items)) if at not in slot.episodes]
    outputs = [(items[at].task, items[at].target_length, slot.completions[at].tokens) for at in plain]
    rewards = dict(zip(plain, workload.rewards(outputs), strict=True))
    rewards |= {at: workload.episode_reward(items[at], episode) for at, episode in slot.episodes.items()}
    return [as_rollout(items[at], slot.completions[at], rewards[at]) for at in range(len(items))]


def submission_file(
    lease: api.Lease, rollouts: Sequence[Rollout], *, run_id: str, worker_key: str, numerics_class: str
) -> bytes:
    header = RolloutHeader(
        run_id=run_id,
        epoch=lease.epoch,
        step=lease.step,
        attempt=lease.attempt,
        slot=lease.slot,
        lease_id=lease.lease_id,
        worker_key=worker_key,
        policy_version=lease.policy_version,
        manifest_digest=lease.manifest_digest,
        numerics_class=numerics_class,
    )
    return write_rollouts(header, list(rollouts))
