"""Worker and validator derive the same work and the same rewards from the descriptor alone."""

from collections.abc import Mapping

import pytest

from shoal.config import RewardConfig, RolloutConfig, TasksConfig
from shoal.errors import ConfigError
from shoal.policy import bundled_directory
from shoal.protocol.assignment import slot_seed
from shoal.protocol.steps import StepId, step_secret
from shoal.tasks import CODEC_FILES, load_tasks
from shoal.tasks.workload import Workload
from support.samples import RUN_SECRET, descriptor

TASKS = TasksConfig(count=30, heldout=5)


@pytest.fixture(scope="module")
def files() -> Mapping[str, bytes]:
    directory = bundled_directory()
    return {name: (directory / name).read_bytes() for name in CODEC_FILES if (directory / name).is_file()}


def build(files: Mapping[str, bytes], **changes: object) -> Workload:
    fields: dict[str, object] = {
        "tasks": TASKS,
        "task_set_digest": load_tasks(TASKS).train.digest,
        "task_count": TASKS.count,
        "rollouts": RolloutConfig(group_size=3, tasks_per_slot=4, max_prompt_tokens=64, max_new_tokens=40),
        "reward": RewardConfig(target_lengths=(16, 32), length_alpha=0.01),
    }
    return Workload.build(descriptor(**(fields | changes)), files)


def seed(slot: int) -> bytes:
    return slot_seed(step_secret(RUN_SECRET, StepId(step=1)), slot)


def test_two_sides_derive_the_same_items(files: Mapping[str, bytes]) -> None:
    assert build(files).items(seed(0)) == build(files).items(seed(0))
    assert build(files).items(seed(0)) != build(files).items(seed(1))


def test_a_slot_holds_every_sample_of_every_group_in_order(files: Mapping[str, bytes]) -> None:
    items = build(files).items(seed(2))
    assert [(item.group, item.sample) for item in items] == [
        (group, sample) for group in range(4) for sample in range(3)
    ]
    assert len({item.seed for item in items}) == 12
    assert len({(item.group, item.task.problem_id, item.prompt_tokens) for item in items}) == 4


def test_the_prompt_asks_for_the_target_length(files: Mapping[str, bytes]) -> None:
    workload = build(files)
    task = workload.tasks.train[0]
    asked = workload.codec.decode(workload.prompt_tokens(task, 32))
    assert f"{task.prompt} Think for 32 tokens" in asked
    assert "Think for" not in workload.codec.decode(workload.prompt_tokens(task, 0))


def test_the_reward_is_the_answer_minus_the_distance_from_the_target(files: Mapping[str, bytes]) -> None:
    workload = build(files)
    task = workload.tasks.train[0]
    answer = task.verification_info["answer"]
    tokens = [*workload.codec.encode(f"</think>{answer}"), *workload.codec.eos_token_ids]
    reward = workload.reward(task, 16, tokens)
    assert reward.task_reward == 1.0
    assert reward.length_penalty == pytest.approx(0.01 * (16 - len(tokens)))
    assert reward.total == pytest.approx(1.0 - reward.length_penalty)
    assert reward.exact
    assert workload.reward(task, 0, tokens).total == 1.0
    wrong = workload.reward(task, 0, workload.codec.encode(f"</think>{answer + 1}"))
    assert (wrong.total, wrong.why) == (0.0, f"answered {answer + 1}, expected {answer}")


def test_a_started_chunk_needs_a_proof(files: Mapping[str, bytes]) -> None:
    workload = build(files)
    assert [workload.chunk_count(tokens) for tokens in (1, 32, 33, 64)] == [1, 1, 2, 2]


def test_another_task_set_is_refused_with_an_upgrade_hint(files: Mapping[str, bytes]) -> None:
    with pytest.raises(ConfigError, match="Install the release"):
        build(files, task_set_digest="ab" * 32)


def test_a_prompt_beyond_the_limit_is_refused_and_never_submitted(files: Mapping[str, bytes]) -> None:
    workload = build(files, rollouts=RolloutConfig(max_prompt_tokens=8))
    with pytest.raises(ConfigError, match="the run allows 8"):
        workload.items(seed(0))
