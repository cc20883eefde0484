"""Gathering answers survives being killed, refuses to mix, and does not depend on who does the work."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from shoal.config import TasksConfig
from shoal.errors import ConfigError, UnavailableError
from shoal.evaluation import EngineSpec, Journal, SamplingSettings, answer_tasks, make_executor
from shoal.evaluation.executors import Answered, Batch
from shoal.locks import BusyError, hold
from shoal.tasks import load_tasks
from support.answers import answer
from support.tiny_run import Reports

TASKS = list(load_tasks(TasksConfig(count=1, heldout=7)).heldout)


@pytest.fixture
def spec(tiny_policy: Path) -> EngineSpec:
    return EngineSpec(str(tiny_policy), "torch", SamplingSettings(samples=2, max_new_tokens=8), threads=1)


class Dying:
    """Answers by hand, and dies at a batch."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.dies_at, self.asked = dies_at, list[int]()

    def __call__(self, batches: Sequence[Batch]) -> Iterator[Answered]:
        for number, tasks in batches:
            if number == self.dies_at:
                raise KeyboardInterrupt
            self.asked.append(number)
            yield number, [answer(task.problem_id, sample, 1.0) for task in tasks for sample in range(2)]


def test_a_killed_run_goes_on_with_the_batches_that_are_missing(tmp_path: Path, spec: EngineSpec) -> None:
    with pytest.raises(KeyboardInterrupt):
        answer_tasks(TASKS, spec, Dying(dies_at=2), tmp_path, Reports(), batch_tasks=2)
    reports, executor = Reports(), Dying()
    answers = list(answer_tasks(TASKS, spec, executor, tmp_path, reports, batch_tasks=2).answers())
    assert executor.asked == [2, 3]
    assert [one.problem_id for one in answers] == [task.problem_id for task in TASKS for _ in range(2)]
    assert reports.some("2 of 4 batches were there already")
    assert reports.some("batch 4/4")


def test_the_order_of_the_executor_does_not_matter(tmp_path: Path, spec: EngineSpec) -> None:
    def backwards(batches: Sequence[Batch]) -> Iterator[Answered]:
        return Dying()(list(reversed(batches)))

    journal = answer_tasks(TASKS, spec, backwards, tmp_path, Reports(), batch_tasks=2)
    assert [one.problem_id for one in journal.answers()][::2] == [task.problem_id for task in TASKS]


def test_answers_to_something_else_are_never_mixed_in(tmp_path: Path, spec: EngineSpec) -> None:
    answer_tasks(TASKS, spec, Dying(), tmp_path, Reports())
    other = EngineSpec(spec.model, spec.engine, SamplingSettings(samples=2, max_new_tokens=9))
    with pytest.raises(ConfigError, match="another max_new_tokens: 8, not 9"):
        answer_tasks(TASKS, other, Dying(), tmp_path, Reports())
    with pytest.raises(ConfigError, match="another tasks"):
        answer_tasks(TASKS[1:], spec, Dying(), tmp_path, Reports())


def test_half_written_batches_are_not_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {"a": 1})
    journal.add(3, [answer("a", 0, 1.0)])
    (tmp_path / ".tmp-x").write_bytes(b"half")
    assert journal.done() == {3}
    assert [one.problem_id for one in journal.answers()] == ["a"]


def test_two_processes_do_not_gather_in_one_place(tmp_path: Path, spec: EngineSpec) -> None:
    with hold(tmp_path / "lock", "held"), pytest.raises(BusyError, match="Another process gathers answers"):
        answer_tasks(TASKS, spec, Dying(), tmp_path, Reports())


def test_tasks_that_share_an_id_are_refused(tmp_path: Path, spec: EngineSpec) -> None:
    with pytest.raises(ConfigError, match="Two tasks have the id"):
        answer_tasks([*TASKS, TASKS[0]], spec, Dying(), tmp_path, Reports())
    with pytest.raises(ConfigError, match="empty"):
        answer_tasks([], spec, Dying(), tmp_path, Reports())


def test_a_cluster_that_is_not_there_is_named(spec: EngineSpec) -> None:
    executor = make_executor(spec, count=1, ray_address="127.0.0.1:1")
    with pytest.raises(UnavailableError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        list(executor([(0, TASKS[:1])]))


@pytest.mark.slow
def test_processes_give_the_same_answers_as_one(tmp_path: Path, spec: EngineSpec) -> None:
    alone = answer_tasks(TASKS, spec, make_executor(spec, count=1), tmp_path / "1", Reports(), batch_tasks=2)
    several = answer_tasks(TASKS, spec, make_executor(spec, count=2), tmp_path / "2", Reports(), batch_tasks=2)
    assert list(several.answers()) == list(alone.answers())
