"""Leases just in time on the event clock: fresh groups, and a trainer that waits no longer, whatever keys do."""

from dataclasses import replace

import pytest

from shoal.config import build_config
from shoal.simulation import Behaviour, Outcome, Scenario, Work, WorkerPlan, simulate

STEPS = 14
WORK = Work(seconds=0.8, spread=0.2)


def run(train_s: float, *, just_in_time: bool, behaviour: Behaviour | None = None, work: Work = WORK) -> Outcome:
    """Four honest keys, which fill a batch in about 1.5 s, and two hostile ones if they have a behaviour."""
    config = build_config(
        {
            "run": {"steps": 1000},
            "rollouts": {"group_size": 2, "tasks_per_slot": 2, "max_prompt_tokens": 16, "max_new_tokens": 64},
            "training": {"async_level": 2, "groups_per_step": 4},
            "coordinator": {"lease_s": 60, "just_in_time": just_in_time},
            "trust": {"stake_tokens": 100_000},
        }
    )
    workers = [WorkerPlan(f"honest-{number}") for number in range(4)]
    if behaviour is not None:
        workers += [WorkerPlan(f"hostile-{number}", behaviour=behaviour) for number in range(2)]
    return simulate(Scenario(config=config, workers=workers, work=work, steps=STEPS, train_s=train_s, validate_s=0.05))


def step_s(outcome: Outcome) -> float:
    """Of the second half; a swarm that runs ahead forms its batches earlier, but not more of them."""
    half = STEPS // 2
    return (outcome.formed_at[-1] - outcome.formed_at[half]) / (STEPS - 1 - half)


def test_a_fast_swarm_gives_fresh_groups_and_the_trainer_does_not_wait() -> None:
    at_once, in_time = run(6.0, just_in_time=False), run(6.0, just_in_time=True)
    assert at_once.mean_age > 1.6
    assert in_time.mean_age < at_once.mean_age  # the first cycles, before anything is measured, included
    last = in_time.ages[len(in_time.ages) // 2 :]
    assert sum(last) / len(last) <= 1.25
    assert step_s(in_time) <= 1.02 * step_s(at_once)


@pytest.mark.parametrize("useful_share", [0.3, 0.95])
def test_groups_are_fresh_whatever_share_of_them_is_useful(useful_share: float) -> None:
    """A share that is guessed wrong leaves a surplus, which is a version older in the next batch."""
    outcome = run(6.0, just_in_time=True, work=replace(WORK, useful_share=useful_share))
    last = outcome.ages[len(outcome.ages) // 2 :]
    assert sum(last) / len(last) <= 1.25


@pytest.mark.parametrize("train_s", [0.3, 1.5])
def test_a_slow_swarm_loses_nothing(train_s: float) -> None:
    at_once, in_time = run(train_s, just_in_time=False), run(train_s, just_in_time=True)
    assert step_s(in_time) <= 1.02 * step_s(at_once)


@pytest.mark.parametrize(
    "behaviour",
    [Behaviour(attack="stall", after=8, every=3), Behaviour(attack="just_in_time", after=8)],
    ids=lambda behaviour: f"{behaviour.attack}-{behaviour.every}",
)
def test_keys_that_work_and_then_stall_do_not_starve_the_trainer_through_the_rule(behaviour: Behaviour) -> None:
    at_once = run(6.0, just_in_time=False, behaviour=behaviour)
    in_time = run(6.0, just_in_time=True, behaviour=behaviour)
    assert step_s(in_time) <= 1.05 * step_s(at_once)
    assert in_time.mean_age <= at_once.mean_age
