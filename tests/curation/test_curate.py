"""From raw tasks to a band: what is dropped, why, and what a kill costs."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from shoal.curation import Band, CurationSettings, curate
from shoal.curation.curate import sieve
from shoal.errors import ConfigError
from shoal.evaluation import EngineSpec, SamplingSettings
from shoal.evaluation.executors import Answered, Batch
from shoal.tasks import Task
from support.answers import answer
from support.tiny_run import Reports

SPEC = EngineSpec("bundled", "torch", SamplingSettings(samples=4))


def task(name: str, prompt: str) -> Task:
    return Task(problem_id=name, source="s", task_type="integer_answer", prompt=prompt, verification_info={"answer": 1})


TASKS = [
    task("hard", "Compute 1+1."),
    task("good", "Compute 2+2."),
    task("easy", "Compute 3+3."),
    task("again", "compute 2 + 2"),
    task("leaked", "Compute 4+4."),
]
EVALUATION = [task("secret", "Compute 4+4!")]
SOLVED = {"hard": 0, "good": 2, "easy": 4}


class Executor:
    """Solves each task as often as the table says."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, batches: Sequence[Batch]) -> Iterator[Answered]:
        for number, tasks in batches:
            self.asked += [task.problem_id for task in tasks]
            yield (
                number,
                [answer(one.problem_id, k, float(k < SOLVED[one.problem_id])) for one in tasks for k in range(4)],
            )


def test_every_task_is_kept_or_dropped_for_one_reason(tmp_path: Path) -> None:
    executor, reports = Executor(), Reports()
    summary = curate(TASKS, EVALUATION, SPEC, executor, tmp_path, reports)
    kept = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    dropped = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    assert [(row["problem_id"], row["solve_rate"]) for row in kept] == [("good", 0.5)]
    assert {row["problem_id"]: row["reason"] for row in dropped} == {
        "hard": "too hard",
        "easy": "too easy",
        "again": "duplicate",
        "leaked": "contaminated",
    }
    assert json.loads(json.dumps(summary)) == json.loads((tmp_path / "curation.json").read_bytes())
    assert summary["histogram"] == {"0/4": 1, "1/4": 0, "2/4": 1, "3/4": 0, "4/4": 1}
    assert (summary["tasks"], summary["kept"]) == (5, 1)
    assert reports.some("kept 1 of 5 tasks")
    assert reports.some("2/4 ████")


def test_no_sample_is_spent_on_what_the_text_decides(tmp_path: Path) -> None:
    executor = Executor()
    curate(TASKS, EVALUATION, SPEC, executor, tmp_path, Reports())
    assert executor.asked == ["hard", "good", "easy"]


def test_a_second_run_samples_nothing_and_may_choose_another_band(tmp_path: Path) -> None:
    curate(TASKS, EVALUATION, SPEC, Executor(), tmp_path, Reports())
    executor = Executor()
    summary = curate(TASKS, EVALUATION, SPEC, executor, tmp_path, Reports(), settings=CurationSettings(Band(0.0, 1.0)))
    assert executor.asked == []
    assert summary["kept"] == 3


def test_kept_tasks_load_as_a_task_set(tmp_path: Path) -> None:
    from shoal.config import TasksConfig
    from shoal.tasks.sources import tasks_to_measure

    curate(TASKS, EVALUATION, SPEC, Executor(), tmp_path, Reports())
    loaded = tasks_to_measure(TasksConfig(source=str(tmp_path / "tasks.jsonl")))
    assert [(one.problem_id, one.prompt, one.solve_rate) for one in loaded] == [("good", "Compute 2+2.", 0.5)]


def test_similar_prompts_are_dropped_where_the_owner_asks_for_it() -> None:
    words = " ".join(f"word{number}" for number in range(60))
    tasks = [task("first", f"{words} end"), task("second", f"{words} finish")]
    assert [one.reason for one in sieve(tasks, [], CurationSettings())] == ["", ""]
    assert [one.reason for one in sieve(tasks, [], CurationSettings(similarity=0.9))] == ["", "duplicate"]


def test_a_task_set_that_is_its_own_evaluation_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No task is left"):
        curate(TASKS, TASKS, SPEC, Executor(), tmp_path, Reports())
