"""Whole swarms on the event clock: no attack that is not a forgery slows the honest keys down by much."""

from typing import get_args

import pytest

from shoal.config import build_config
from shoal.simulation import Behaviour, Outcome, Scenario, Work, WorkerPlan, simulate
from shoal.simulation.attacks import FAILING, SLOW, attacks
from shoal.simulation.workers import Attack

STEPS = 20
WORK = Work(seconds=4.0, spread=0.2)
CONFIG = build_config(
    {
        "run": {"steps": 1000},
        "rollouts": {"group_size": 2, "tasks_per_slot": 2, "max_prompt_tokens": 16, "max_new_tokens": 64},
        "training": {"async_level": 2, "groups_per_step": 8},
        "coordinator": {"lease_s": 60},
        "trust": {"stake_tokens": 100_000},
    }
)
HONEST = [WorkerPlan(f"honest-{number}") for number in range(6)]


def run(*more: WorkerPlan) -> Outcome:
    return simulate(Scenario(config=CONFIG, workers=[*HONEST, *more], work=WORK, steps=STEPS))


@pytest.fixture(scope="module")
def usual() -> Outcome:
    return run()


def test_the_same_scenario_has_the_same_outcome(usual: Outcome) -> None:
    assert run() == usual
    assert len(usual.formed_at) == STEPS
    assert len(usual.rewards) == 8 * STEPS
    assert 0 < len(usual.lengths) <= 8 * STEPS


ONE_KEY = [
    *(Behaviour(attack, after=after) for attack in FAILING for after in (0, 5)),
    *(Behaviour(attack) for attack in SLOW),
    *(Behaviour(attack, when_reliable=True) for attack in ("stall", "just_late")),
    *(Behaviour(attack, renews=True) for attack in ("stall", "junk_at_once")),
    Behaviour("stall", every=2),
    Behaviour("return"),
    Behaviour("old_version"),
    Behaviour("idle", after=5),
]


@pytest.mark.parametrize("behaviour", ONE_KEY, ids=repr)
def test_one_key_slows_a_run_down_by_a_fifth_at_most(usual: Outcome, behaviour: Behaviour) -> None:
    attacked = run(WorkerPlan("hostile", behaviour=behaviour))
    assert attacked.steps_per_minute >= 0.8 * usual.steps_per_minute


@pytest.mark.parametrize("every", [1, 2, 10])
def test_a_third_of_the_keys_slows_a_run_down_by_half_at_most(usual: Outcome, every: int) -> None:
    hostile = [WorkerPlan(f"hostile-{n}", behaviour=Behaviour(attack="stall", every=every)) for n in range(3)]
    assert run(*hostile).steps_per_minute >= 0.5 * usual.steps_per_minute


def test_slow_honest_keys_slow_nobody_down(usual: Outcome) -> None:
    slow = [WorkerPlan("third", speed=1 / 3), WorkerPlan("tenth", speed=0.1), WorkerPlan("pausing", pauses=(40, 15))]
    assert run(*slow).steps_per_minute >= 0.95 * usual.steps_per_minute


def test_ten_stallers_that_come_with_new_keys_stop_nobody(usual: Outcome) -> None:
    crowd = [WorkerPlan(f"hostile-{n}", behaviour=Behaviour("stall", renews=True)) for n in range(10)]
    assert run(*crowd).steps_per_minute >= 0.5 * usual.steps_per_minute


def test_the_list_of_attacks_has_each_way_and_each_pattern() -> None:
    found = attacks()
    assert {behaviour.attack for behaviour in found.values()} == set(get_args(Attack))
    assert any(behaviour.when_reliable for behaviour in found.values())
    assert any(behaviour.renews for behaviour in found.values())
    assert len(set(found.values())) == len(found)
