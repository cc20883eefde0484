"""Small valid things to start from: keys, a descriptor, a rollout file."""

from shoal.config import RewardConfig, RolloutConfig, TasksConfig
from shoal.identity import Keypair
from shoal.protocol.descriptor import FileReference, RunDescriptor
from shoal.protocol.rollouts import Rollout, RolloutHeader
from shoal.protocol.signing import PROTOCOL_VERSION
from shoal.protocol.steps import secret_commitment

RUN_SECRET = bytes(range(32))
NUMERICS_CLASS = "torch/float32/cpu"


def keypair(name: str) -> Keypair:
    return Keypair.from_seed(name.encode().ljust(32, b"."))


def descriptor(**changes: object) -> RunDescriptor:
    fields: dict[str, object] = {
        "run_id": "run-1",
        "protocol": PROTOCOL_VERSION,
        "run_key": keypair("run").public,
        "coordinator_key": keypair("coordinator").public,
        "coordinator_url": "http://coordinator",
        "relay_urls": ("http://relay",),
        "model_files": {"config.json": FileReference(digest="ab" * 32, bytes=10)},
        "tasks": TasksConfig(),
        "task_set_digest": "cd" * 32,
        "task_count": 100,
        "rollouts": RolloutConfig(group_size=2, tasks_per_slot=2, max_prompt_tokens=16, max_new_tokens=40),
        "reward": RewardConfig(),
        "async_level": 2,
        "chunk_tokens": 32,
        "top_k": 128,
        "numerics_classes": (NUMERICS_CLASS,),
        "secret_commitment": secret_commitment(RUN_SECRET),
    }
    return RunDescriptor.model_validate(fields | changes)


def header(**changes: object) -> RolloutHeader:
    fields: dict[str, object] = {
        "run_id": "run-1",
        "step": 3,
        "slot": 1,
        "lease_id": "lease-1",
        "worker_key": keypair("worker").public,
        "policy_version": 2,
        "manifest_digest": "ef" * 32,
        "numerics_class": NUMERICS_CLASS,
    }
    return RolloutHeader.model_validate(fields | changes)


def rollout(group: int = 0, sample: int = 0, tokens: int = 5) -> Rollout:
    return Rollout(
        task_id=f"task-{group}",
        group=group,
        sample=sample,
        input_tokens=[1, 2, 3],
        output_tokens=list(range(tokens)),
        segment_lengths=[tokens],
        output_logprobs=[-0.5] * tokens,
        target_length=8,
        task_reward=1.0,
        length_penalty=0.25,
        reward=0.75,
        finish_reason="stop",
        proofs=[b"\x01" * 258],
    )
