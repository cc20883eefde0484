"""What an answer depends on: the policy, the problem and the seed; not the company it is asked in."""

import os
import threading
from pathlib import Path

import pytest

from shoal.config import TasksConfig
from shoal.evaluation import AnswerGenerator, SamplingSettings
from shoal.evaluation.generator import category_of, derive_seed, policy_digest
from shoal.tasks import Outcome, Task, Verifier, load_tasks, score
from shoal.tasks.verifiers.registry import VERIFIERS

TASKS = list(load_tasks(TasksConfig(count=1, heldout=4)).heldout)
SETTINGS = SamplingSettings(samples=3, max_new_tokens=12, target_lengths=(16, 32))


def test_order_and_batching_change_no_answer(tiny_policy: Path) -> None:
    generator = AnswerGenerator.load(str(tiny_policy), "torch", SETTINGS)
    together = {(one.problem_id, one.sample): one for one in generator.answer(TASKS)}
    apart = [one for task in reversed(TASKS) for one in generator.answer([task])]
    assert {(one.problem_id, one.sample): one for one in apart} == together
    assert len(together) == 12


def test_every_answer_is_scored_and_says_why(tiny_policy: Path) -> None:
    generator = AnswerGenerator.load(str(tiny_policy), "torch", SETTINGS)
    tasks = {task.problem_id: task for task in TASKS}
    for one in generator.answer(TASKS):
        verdict = score(tasks[one.problem_id], one.completion)
        assert (one.reward, one.why) == (verdict.reward, verdict.why)
        assert one.completion == generator.codec.decode(one.output_tokens)
        assert one.target_length in (16, 32)
        assert 1 <= len(one.output_tokens) <= 12


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core scores one answer at a time")
def test_verifiers_that_wait_for_other_processes_score_side_by_side(
    tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = threading.Barrier(2)

    def check_together(task: Task, text: str) -> Outcome:
        meeting.wait(timeout=60)
        return Outcome(1.0, "met")

    monkeypatch.setitem(VERIFIERS, "meeting", Verifier(check_together, exact=True, slow=True))
    task = Task(problem_id="1", source="s", task_type="meeting", prompt="?", verification_info={})
    settings = SamplingSettings(samples=2, max_new_tokens=2)
    answers = AnswerGenerator.load(str(tiny_policy), "torch", settings).answer([task])
    assert [one.why for one in answers] == ["met", "met"]


def test_samples_of_a_problem_differ_and_another_seed_gives_others(tiny_policy: Path) -> None:
    first = AnswerGenerator.load(str(tiny_policy), "torch", SETTINGS)
    other = AnswerGenerator(first.engine, first.codec, SamplingSettings(samples=3, max_new_tokens=12, seed="other"))
    answers = first.answer(TASKS[:1])
    assert len({tuple(one.output_tokens) for one in answers}) > 1
    assert [one.seed for one in answers] != [one.seed for one in other.answer(TASKS[:1])]


def test_seeds_of_different_questions_never_meet() -> None:
    assert derive_seed("1", "23", "4") != derive_seed("12", "3", "4")
    assert 0 <= derive_seed("s", "p", "0") < 1 << 64


def test_the_category_comes_from_the_metadata_or_the_type() -> None:
    task = Task(problem_id="1", source="s", task_type="integer_answer", prompt="?", verification_info={"answer": 1})
    assert category_of(task) == "integer_answer"
    named = task.model_copy(update={"metadata": {"level": 3, "category": "algebra"}})
    assert category_of(named) == "algebra"
    assert category_of(named, "level") == "3"
    assert category_of(named, "nothing") == "integer_answer"


def test_another_policy_has_another_digest(tiny_policy: Path, tmp_path: Path) -> None:
    from support.tiny_run import save_policy

    assert policy_digest(tiny_policy) != policy_digest(save_policy(tmp_path / "other", seed=1))
    assert policy_digest(tiny_policy) == policy_digest(tiny_policy)
