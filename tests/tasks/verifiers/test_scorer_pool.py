"""Processes that score reasoning-gym answers: what takes too long ends in no answer, and the next one is scored."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shoal.config import TasksConfig
from shoal.tasks import Task, load_tasks
from shoal.tasks.verifiers.scorer_pool import ScorerPool


@contextmanager
def one_scorer(timeout_s: float) -> Iterator[ScorerPool]:
    pool = ScorerPool(1, timeout_s=timeout_s)
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="module")
def task() -> Task:
    return load_tasks(TasksConfig(source="reasoning-gym:countdown", count=1, heldout=1)).train[0]


def ask(pool: ScorerPool, task: Task, answer: str) -> float | None:
    found = pool.ask(task.verification_info["dataset"], task.verification_info["entry"], answer)
    assert found is None or found.cost_s >= 0.0
    return found and found.reward


def test_a_tower_of_powers_ends_in_nothing_and_the_next_answer_is_scored(task: Task) -> None:
    with one_scorer(60.0) as pool:
        tower = ask(pool, task, "9**9**9**9")
        assert tower is None or tower < 1.0
        assert ask(pool, task, task.verification_info["entry"]["metadata"]["expression"]) == 1.0


def test_a_process_that_takes_too_long_is_killed_and_replaced(task: Task) -> None:
    right = task.verification_info["entry"]["metadata"]["expression"]
    with one_scorer(0.0) as pool:
        assert ask(pool, task, "9**9**9**9") is None
        pool._timeout_s = 60.0
        assert ask(pool, task, right) == 1.0
