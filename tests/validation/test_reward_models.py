"""The reward model ranks groups on the validator's side and never touches what can be verified."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.config import RewardConfig
from shoal.errors import ConfigError
from shoal.files import digest_file
from shoal.policy import ModelError
from shoal.policy.reward_model import build_classifier
from shoal.protocol import FileReference
from shoal.tasks import Task, TaskSet, is_learned
from shoal.tasks.workload import Reward
from shoal.validation.checks import Checked
from shoal.validation.reward_models import RewardModelScorer, make_scorer
from support.samples import descriptor
from support.tiny_run import save_policy

POLITE = "reward_model:polite"


class Scorer:
    """Prefers long completions."""

    def rank(self, prompt: Any, completions: Any) -> list[float]:
        longest = max(len(completion) for completion in completions)
        return [len(completion) / longest for completion in completions]


def task(kind: str) -> Task:
    info = {} if is_learned(kind) else {"answer": 4}
    return Task(problem_id=kind, source="s", task_type=kind, prompt="?", verification_info=info)


def checked(kind: str) -> Checked:
    """Two groups of two; in each the second completion is twice as long."""
    items: list[Any] = [SimpleNamespace(group=g, task=task(kind), prompt_tokens=(1,)) for g in (0, 0, 1, 1)]
    rollouts: list[Any] = [SimpleNamespace(output_tokens=[1] * n) for n in (2, 4, 3, 6)]
    earned = [0.0 if is_learned(kind) else float(number % 2) for number in range(4)]
    rewards = [Reward(value, 0.25, value - 0.25, "why", True) for value in earned]
    header: Any = None
    return Checked(header, rollouts, items, rewards)


def amended(kind: str, parts: dict[str, float]) -> list[Reward]:
    models: Any = {"polite": Scorer()}
    return RewardModelScorer(models, parts).amend(checked(kind)).rewards


def test_verified_tasks_keep_their_task_reward_and_gain_the_weighted_ranking() -> None:
    rewards = amended("integer_answer", {"task": 1.0, POLITE: 0.1})
    assert [reward.task_reward for reward in rewards] == [0.0, 1.0, 0.0, 1.0]
    assert [reward.total for reward in rewards] == pytest.approx([-0.2, 0.85, -0.2, 0.85])
    assert all(reward.exact for reward in rewards)
    assert rewards[0].why == "why; reward_model:polite gives it a chance of 0.50 against its group"


def test_tasks_without_a_verifier_are_scored_by_the_ranking_alone() -> None:
    rewards = amended(POLITE, {})
    assert [reward.task_reward for reward in rewards] == [0.5, 1.0, 0.5, 1.0]
    assert [reward.total for reward in rewards] == pytest.approx([0.25, 0.75, 0.25, 0.75])
    assert not any(reward.exact for reward in rewards)


def test_a_model_may_be_the_scorer_of_a_task_and_a_part_as_well() -> None:
    rewards = amended(POLITE, {"task": 0.8, POLITE: 0.2})
    assert [reward.task_reward for reward in rewards] == pytest.approx([0.4, 0.8, 0.4, 0.8])
    assert [reward.total for reward in rewards] == pytest.approx([0.25, 0.75, 0.25, 0.75])


def test_a_validator_that_could_not_count_a_part_does_not_start() -> None:
    plain, scored = TaskSet([task("integer_answer")]), TaskSet([task("integer_answer"), task(POLITE)])
    assert make_scorer({}, descriptor(), plain) is None
    with pytest.raises(ConfigError, match=r"Task 1 \(reward_model:polite\) is scored by reward_model:polite"):
        make_scorer({}, descriptor(), scored)
    with pytest.raises(ConfigError, match=r"reward.parts names reward_model:polite"):
        make_scorer({}, descriptor(reward=RewardConfig(parts={"task": 1.0, POLITE: 0.1})), plain)


def test_a_reward_model_must_read_the_tokens_that_the_policy_writes(tmp_path: Path) -> None:
    base = save_policy(tmp_path / "model", seed=0)
    build_classifier(base).save_pretrained(tmp_path / "scorer")
    tokenizer = base / "tokenizer.json"
    (tmp_path / "scorer" / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    models = {"polite": str(tmp_path / "scorer")}
    files = {"tokenizer.json": FileReference(digest=digest_file(tokenizer), bytes=tokenizer.stat().st_size)}
    scorer = make_scorer(models, descriptor(model_files=files), TaskSet([task(POLITE)]))
    assert scorer is not None
    assert len(scorer.models["polite"].rank((5, 6), [(7,), (8, 9)])) == 2
    other = {"tokenizer.json": FileReference(digest="0" * 64, bytes=1)}
    with pytest.raises(ModelError, match="other tokens"):
        make_scorer(models, descriptor(model_files=other), TaskSet([task(POLITE)]))
