"""What reward models score is named, is never claimed by a worker, and never proves anything."""

import pytest

from shoal.config import RewardConfig
from shoal.errors import ConfigError
from shoal.tasks import MalformedTaskError, Task, TaskSet, is_exact, row_to_task, score, verifiable
from shoal.tasks.rewards import task_score
from shoal.tasks.verifiers.requirements import check_requirements
from shoal.tasks.verifiers.reward_models import LearnedPart, check_named, is_learned, learned_parts

POLITE = "reward_model:polite"


def task(task_type: str) -> Task:
    info = {} if is_learned(task_type) else {"answer": 4}
    return Task(problem_id=f"a/{task_type}", source="s", task_type=task_type, prompt="?", verification_info=info)


@pytest.mark.parametrize(
    "name", ["reward_model", "reward_model:", "reward_model:../x", "reward_model:a b", "polite", "m:f"]
)
def test_only_a_prefix_and_a_plain_name_mean_a_reward_model(name: str) -> None:
    assert is_learned(POLITE)
    assert not is_learned(name)


def test_nobody_claims_what_a_reward_model_will_say() -> None:
    assert not is_exact(POLITE)
    verdict = score(task(POLITE), "anything</think>at all")
    assert (verdict.reward, verdict.exact, verdict.why) == (0.0, False, "left to the reward model of the validator")
    alone = task_score(task("integer_answer"), "</think>4", {POLITE: 1.0})
    assert (alone.reward, alone.exact, alone.why) == (0.0, False, "left to the reward model of the validator")
    beside = task_score(task("integer_answer"), "</think>4", {"task": 0.9, POLITE: 0.1})
    assert beside.reward == pytest.approx(0.9)
    assert beside.exact, "the part that can be verified stays proof"


def test_the_weight_of_a_model_is_that_of_its_part_or_of_the_task() -> None:
    assert learned_parts("integer_answer", {}) == []
    assert learned_parts("integer_answer", {"task": 0.9, POLITE: 0.1}) == [LearnedPart("polite", 0.1, is_task=False)]
    assert learned_parts(POLITE, {}) == [LearnedPart("polite", 1.0, is_task=True)]
    both = learned_parts("reward_model:other", {"task": 0.9, POLITE: 0.1})
    assert both == [LearnedPart("other", 0.9, is_task=True), LearnedPart("polite", 0.1, is_task=False)]
    assert learned_parts(POLITE, {"format": 1.0}) == []


def test_a_name_without_a_model_and_a_model_without_a_use_are_refused_with_their_place() -> None:
    plain, ranked = TaskSet([task("integer_answer")]), TaskSet([task("integer_answer"), task(POLITE)])
    check_named({}, plain, {})
    check_named({"task": 1.0, POLITE: 0.1}, plain, {"polite": "dir"})
    check_named({}, ranked, {"polite": "dir"})
    with pytest.raises(ConfigError, match=r"reward.parts names reward_model:polite, which .* It names rude\."):
        check_named({POLITE: 0.1}, plain, {"rude": "dir"})
    with pytest.raises(ConfigError, match=r"Task 1 \(a/reward_model:polite\) is scored by reward_model:polite, which"):
        check_named({}, ranked, {})
    with pytest.raises(ConfigError, match=r"names polite, but nothing uses it"):
        check_named({"task": 1.0}, plain, {"polite": "dir"})


def test_workers_need_nothing_for_it() -> None:
    check_requirements(TaskSet([task(POLITE)]), RewardConfig(parts={"task": 1.0, POLITE: 0.1}), own_verifiers=())


def test_a_ranking_of_groups_is_no_part_of_one_answer() -> None:
    row = {"prompt": "?", "task_type": "multi", "verification_info": {"parts": [{"task_type": POLITE}]}}
    with pytest.raises(MalformedTaskError, match=r"Row 3 of file .*ranks whole groups: name it in reward.parts"):
        row_to_task(row, 3, "file")


def test_a_policy_is_measured_on_the_other_tasks_only() -> None:
    assert verifiable([task("integer_answer"), task(POLITE)]) == [task("integer_answer")]
    assert verifiable([]) == []
    with pytest.raises(ConfigError, match="Only reward models"):
        verifiable([task(POLITE)])
