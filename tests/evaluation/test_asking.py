"""Gathering answers survives being killed, refuses to mix, and does not depend on who does the work."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from shoal.config import TasksConfig
from shoal.errors import ConfigError, UnavailableError
from shoal.evaluation import AskSettings, Journal, Post, ask_all, make_crew
from shoal.evaluation.crews import Answered, Batch
from shoal.locks import BusyError, hold
from shoal.tasks import load_tasks
from support.answers import answer
from support.tiny_run import Reports

TASKS = list(load_tasks(TasksConfig(count=1, heldout=7)).heldout)


@pytest.fixture
def post(tiny_policy: Path) -> Post:
    return Post(str(tiny_policy), "torch", AskSettings(samples=2, max_new_tokens=8), threads=1)


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


def test_a_killed_run_goes_on_with_the_batches_that_are_missing(tmp_path: Path, post: Post) -> None:
    with pytest.raises(KeyboardInterrupt):
        ask_all(TASKS, post, Dying(dies_at=2), tmp_path, Reports(), batch_tasks=2)
    reports, crew = Reports(), Dying()
    answers = list(ask_all(TASKS, post, crew, tmp_path, reports, batch_tasks=2).answers())
    assert crew.asked == [2, 3]
    assert [one.problem_id for one in answers] == [task.problem_id for task in TASKS for _ in range(2)]
    assert reports.some("2 of 4 batches were there already")
    assert reports.some("batch 4/4")


def test_the_order_of_the_crew_does_not_matter(tmp_path: Path, post: Post) -> None:
    def backwards(batches: Sequence[Batch]) -> Iterator[Answered]:
        return Dying()(list(reversed(batches)))

    journal = ask_all(TASKS, post, backwards, tmp_path, Reports(), batch_tasks=2)
    assert [one.problem_id for one in journal.answers()][::2] == [task.problem_id for task in TASKS]


def test_answers_to_something_else_are_never_mixed_in(tmp_path: Path, post: Post) -> None:
    ask_all(TASKS, post, Dying(), tmp_path, Reports())
    other = Post(post.model, post.engine, AskSettings(samples=2, max_new_tokens=9))
    with pytest.raises(ConfigError, match="another max_new_tokens: 8, not 9"):
        ask_all(TASKS, other, Dying(), tmp_path, Reports())
    with pytest.raises(ConfigError, match="another tasks"):
        ask_all(TASKS[1:], post, Dying(), tmp_path, Reports())


def test_half_written_batches_are_not_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {"a": 1})
    journal.add(3, [answer("a", 0, 1.0)])
    (tmp_path / ".tmp-x").write_bytes(b"half")
    assert journal.done() == {3}
    assert [one.problem_id for one in journal.answers()] == ["a"]


def test_two_processes_do_not_gather_in_one_place(tmp_path: Path, post: Post) -> None:
    with hold(tmp_path / "lock", "held"), pytest.raises(BusyError, match="Another process gathers answers"):
        ask_all(TASKS, post, Dying(), tmp_path, Reports())


def test_tasks_that_share_an_id_are_refused(tmp_path: Path, post: Post) -> None:
    with pytest.raises(ConfigError, match="Two tasks have the id"):
        ask_all([*TASKS, TASKS[0]], post, Dying(), tmp_path, Reports())
    with pytest.raises(ConfigError, match="empty"):
        ask_all([], post, Dying(), tmp_path, Reports())


def test_a_cluster_that_is_not_there_is_named(post: Post) -> None:
    pytest.importorskip("ray", reason="pip install 'shoal[ray]'")
    crew = make_crew(post, count=1, ray_address="127.0.0.1:1")
    with pytest.raises(UnavailableError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        list(crew([(0, TASKS[:1])]))


@pytest.mark.slow
def test_processes_give_the_same_answers_as_one(tmp_path: Path, post: Post) -> None:
    alone = ask_all(TASKS, post, make_crew(post, count=1), tmp_path / "1", Reports(), batch_tasks=2)
    several = ask_all(TASKS, post, make_crew(post, count=2), tmp_path / "2", Reports(), batch_tasks=2)
    assert list(several.answers()) == list(alone.answers())
