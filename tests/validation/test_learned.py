"""The reward model ranks groups on the validator's side and never touches what can be verified."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.samples import descriptor
from shoal.config import ValidationConfig
from shoal.errors import ConfigError
from shoal.files import digest_file
from shoal.policy.reward_model import build_classifier
from shoal.protocol import FileReference
from shoal.tasks import LEARNED, Task, TaskSet, is_exact, score
from shoal.tasks.workload import Reward
from shoal.validation.checks import Checked
from shoal.validation.learned import LearnedJudge, make_judge
from worker.tiny_run import save_policy


class Judge:
    """Prefers long completions."""

    def rank(self, prompt: Any, completions: Any) -> list[float]:
        longest = max(len(completion) for completion in completions)
        return [len(completion) / longest for completion in completions]


def task(kind: str) -> Task:
    info = {} if kind == LEARNED else {"answer": 4}
    return Task(problem_id=kind, source="s", task_type=kind, prompt="?", verification_info=info)


def checked(kind: str) -> Checked:
    """Two groups of two; in each the second completion is twice as long."""
    items: list[Any] = [SimpleNamespace(group=g, task=task(kind), prompt_tokens=(1,)) for g in (0, 0, 1, 1)]
    rollouts: list[Any] = [SimpleNamespace(output_tokens=[1] * n) for n in (2, 4, 3, 6)]
    rewards = [Reward(float(number % 2), 0.25, number % 2 - 0.25, "why", True) for number in range(4)]
    header: Any = None
    return Checked(header, rollouts, items, rewards)


def test_verified_tasks_keep_their_task_reward_and_gain_the_weighted_ranking() -> None:
    judge: Any = Judge()
    rewards = LearnedJudge(judge, 0.1).amend(checked("integer_answer")).rewards
    assert [reward.task_reward for reward in rewards] == [0.0, 1.0, 0.0, 1.0]
    assert [reward.total for reward in rewards] == pytest.approx([-0.2, 0.85, -0.2, 0.85])
    assert "chance of 0.50" in rewards[0].why


def test_tasks_without_a_verifier_are_judged_by_the_ranking_alone() -> None:
    judge: Any = Judge()
    rewards = LearnedJudge(judge, 0.1).amend(checked(LEARNED)).rewards
    assert [reward.task_reward for reward in rewards] == [0.5, 1.0, 0.5, 1.0]
    assert [reward.total for reward in rewards] == pytest.approx([0.25, 0.75, 0.25, 0.75])
    assert not any(reward.exact for reward in rewards)


def test_workers_claim_nothing_for_the_learned_part_and_cannot_be_blamed_for_it() -> None:
    verdict = score(task(LEARNED), "anything</think>at all")
    assert (verdict.reward, verdict.exact) == (0.0, False)
    assert not is_exact(LEARNED)


def test_a_run_whose_tasks_need_a_reward_model_is_not_validated_without() -> None:
    with pytest.raises(ConfigError, match="need a reward model"):
        make_judge(ValidationConfig(), descriptor(), TaskSet([task("integer_answer"), task(LEARNED)]))
    assert make_judge(ValidationConfig(), descriptor(), TaskSet([task("integer_answer")])) is None


def test_a_reward_model_must_read_the_tokens_that_the_policy_writes(tmp_path: Path) -> None:
    base = save_policy(tmp_path / "model", seed=0)
    build_classifier(base).save_pretrained(tmp_path / "judge")
    (tmp_path / "judge" / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
    config = ValidationConfig(reward_model=str(tmp_path / "judge"), reward_model_weight=0.3)
    tokenizer = base / "tokenizer.json"
    files = {"tokenizer.json": FileReference(digest=digest_file(tokenizer), bytes=tokenizer.stat().st_size)}
    judge = make_judge(config, descriptor(model_files=files), TaskSet([task(LEARNED)]))
    assert judge is not None
    assert judge.weight == 0.3
    assert len(judge.model.rank((5, 6), [(7,), (8, 9)])) == 2
    other = {"tokenizer.json": FileReference(digest="0" * 64, bytes=1)}
    with pytest.raises(ConfigError, match="other tokens"):
        make_judge(config, descriptor(model_files=other), TaskSet([task(LEARNED)]))
