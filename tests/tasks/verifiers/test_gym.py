from pathlib import Path

import pytest

from shoal.config import TasksConfig
from shoal.errors import ConfigError
from shoal.tasks import load_tasks, score


def test_the_same_name_and_seed_give_the_same_tasks() -> None:
    first, second = (load_tasks(TasksConfig(source="reasoning-gym:gcd", count=20, heldout=5)) for _ in range(2))
    assert first.train.digest == second.train.digest
    assert (len(first.train), len(first.heldout)) == (20, 5)
    assert not {task.prompt for task in first.train} & {task.prompt for task in first.heldout}
    other = load_tasks(TasksConfig(source="reasoning-gym:gcd", count=20, heldout=5, seed=1))
    assert other.train.digest != first.train.digest


def test_an_answer_is_worth_what_its_scorer_says() -> None:
    task = load_tasks(TasksConfig(source="reasoning-gym:gcd", count=2, heldout=1)).train[0]
    right = task.verification_info["entry"]["answer"]
    assert score(task, f"hm</think><answer>{right}</answer>").reward == 1.0
    assert score(task, f"hm</think>\\boxed{{{right}}}").reward == 1.0
    wrong = score(task, "hm</think><answer>no</answer>")
    assert wrong.reward < 1.0
    assert not wrong.exact
    assert wrong.cost_s > 0.0


def test_a_scorer_that_evaluates_the_answer_can_do_no_harm() -> None:
    """countdown's scorer hands the answer to sympy, which evaluates it."""
    task = load_tasks(TasksConfig(source="reasoning-gym:countdown", count=1, heldout=1)).train[0]
    attack = "__import__('os').system('true') or __import__('socket').socket()"
    assert score(task, f"hm</think><answer>{attack}</answer>").reward < 1.0


def test_a_scorer_that_evaluates_the_answer_removes_no_file(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("here")
    task = load_tasks(TasksConfig(source="reasoning-gym:countdown", count=1, heldout=1)).train[0]
    assert score(task, f"hm</think><answer>__import__('os').unlink({str(victim)!r})</answer>").reward < 1.0
    assert victim.read_text() == "here"


def test_an_unknown_dataset_is_named() -> None:
    with pytest.raises(ConfigError, match="no_such_puzzle"):
        load_tasks(TasksConfig(source="reasoning-gym:no_such_puzzle", count=2, heldout=1))
