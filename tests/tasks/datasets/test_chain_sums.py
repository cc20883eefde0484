import random

import pytest

from shoal.config import TasksConfig
from shoal.errors import ConfigError
from shoal.tasks import load_tasks, score
from shoal.tasks.datasets.chain_sums import ChainSum, sample_chain_sum


def test_same_config_gives_the_same_tasks_everywhere() -> None:
    first, second = (load_tasks(TasksConfig(count=50, heldout=20)) for _ in range(2))
    assert first.train.digest == second.train.digest
    assert first.train[17] == second.train[17]


def test_another_seed_gives_other_tasks() -> None:
    digests = {load_tasks(TasksConfig(count=50, heldout=20, seed=seed)).train.digest for seed in range(3)}
    assert len(digests) == 3


def test_a_longer_set_begins_with_the_shorter_one() -> None:
    short, long = (load_tasks(TasksConfig(count=count, heldout=1)).train for count in (10, 20))
    assert [short[i] for i in range(10)] == [long[i] for i in range(10)]


def test_no_seed_shows_a_heldout_problem_to_training() -> None:
    trained = {
        task.prompt for seed in range(4) for task in load_tasks(TasksConfig(count=500, heldout=1, seed=seed)).train
    }
    heldout = {
        task.prompt for seed in range(4) for task in load_tasks(TasksConfig(count=1, heldout=200, seed=seed)).heldout
    }
    assert not trained & heldout


def test_tasks_are_distinct() -> None:
    tasks = load_tasks(TasksConfig(count=2000, heldout=1)).train
    assert len({task.problem_id for task in tasks}) == len(tasks) == 2000


def test_results_stay_between_0_and_99_and_operands_have_two_digits() -> None:
    rng = random.Random(0)
    for problem in (sample_chain_sum(rng) for _ in range(2000)):
        assert 0 <= problem.first + problem.second <= 99
        assert 0 <= problem.answer <= 99
        assert all(10 <= abs(term) <= 99 for term in (problem.first, problem.second, problem.third))


def test_the_stated_answer_is_the_right_one() -> None:
    problem = ChainSum(47, 38, -19)
    assert problem.prompt == "Compute 47+38-19."
    assert problem.answer == 66
    for task in load_tasks(TasksConfig(count=100, heldout=1)).train:
        expression = task.prompt.removeprefix("Compute ").removesuffix(".")
        assert score(task, f"</think>{eval(expression)}").reward == 1.0


def test_more_problems_than_there_are_is_refused_with_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"Lower tasks\.heldout"):
        load_tasks(TasksConfig(count=1, heldout=8_193))


def test_unknown_source_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="builtin:chain-sums"):
        load_tasks(TasksConfig(source="builtin:chain-summs"))
