"""Statistics of tasks add up, also over several groups of one task."""

from pathlib import Path

import pytest

from shoal.coordinator import Store
from shoal.coordinator.store import task_stats as tasks
from shoal.protocol import api


def group(task_id: str, *rewards: float) -> api.GroupVerdict:
    return api.GroupVerdict(
        group=0,
        task_id=task_id,
        useful=len(set(rewards)) > 1,
        tokens=1,
        rewards=list(rewards),
        task_rewards=list(rewards),
    )


@pytest.fixture
def counted(tmp_path: Path) -> api.TaskStatistics:
    store = Store(tmp_path / "store.db")
    groups = [
        *(group("never", 0.0, 0.0), group("never", 0.0, 0.5)),
        *(group("always", 1.0, 1.0), group("always", 1.0, 1.0)),
        *(group("half", 1.0, 0.0), group("half", 0.0, 1.0), group("rare", *[0.0] * 7, 1.0)),
    ]
    try:
        for one in groups:
            store.write(lambda connection, one=one: tasks.count_group(connection, one))  # type: ignore[misc]
        return store.read(tasks.statistics)
    finally:
        store.close()


def test_tasks_are_sorted_by_how_often_they_were_solved(counted: api.TaskStatistics) -> None:
    assert counted.by_solve_rate == {"never": 1, "10–20 %": 1, "50–60 %": 1, "always": 1}


def test_totals_count_every_sample_and_every_group(counted: api.TaskStatistics) -> None:
    assert (counted.tasks, counted.groups, counted.samples, counted.solved) == (4, 7, 20, 7)
    assert counted.useful == 4


def test_a_run_that_has_not_begun_has_no_tasks(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.db")
    try:
        assert store.read(tasks.statistics) == api.TaskStatistics()
    finally:
        store.close()
