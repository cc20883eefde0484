"""Whole swarms on the event clock: no attack that is not a forgery slows the honest keys down by much."""

import pytest

from shoal.config import build_config
from shoal.simulation import Behaviour, Outcome, Scenario, Work, WorkerPlan, simulate
from shoal.simulation.workers import Attack

STEPS = 10
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


@pytest.mark.parametrize("attack", ["stall", "return_late", "junk_late", "junk", "just_in_time"])
@pytest.mark.parametrize("after", [0, 5])
def test_one_key_slows_a_run_down_by_a_fifth_at_most(usual: Outcome, attack: Attack, after: int) -> None:
    behaviour = Behaviour(attack=attack, after=after)
    attacked = run(WorkerPlan("hostile", behaviour=behaviour))
    assert attacked.steps_per_minute >= 0.8 * usual.steps_per_minute


@pytest.mark.parametrize("every", [1, 2, 10])
def test_a_third_of_the_keys_slows_a_run_down_by_half_at_most(usual: Outcome, every: int) -> None:
    hostile = [WorkerPlan(f"hostile-{n}", behaviour=Behaviour(attack="stall", every=every)) for n in range(3)]
    assert run(*hostile).steps_per_minute >= 0.5 * usual.steps_per_minute


def test_slow_honest_keys_slow_nobody_down(usual: Outcome) -> None:
    slow = [WorkerPlan("third", speed=1 / 3), WorkerPlan("tenth", speed=0.1), WorkerPlan("pausing", pauses=(40, 15))]
    assert run(*slow).steps_per_minute >= 0.95 * usual.steps_per_minute
