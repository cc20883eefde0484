"""Whole swarms from scenarios: repeatable, the same with both coordinators, and sensible where the answer is known."""

import json
from typing import Any

import pytest

from shoal.simulation import LocalCoordinator
from shoal.simulation.swarm import SwarmResult, run_swarm
from shoal.simulation.swarm.spec import build_scenario
from simulation.swarm.small import spec, tree


@pytest.fixture(scope="module")
def usual() -> SwarmResult:
    return run_swarm(spec())


def test_the_same_scenario_gives_the_same_numbers(usual: SwarmResult) -> None:
    assert json.dumps(run_swarm(spec()).to_json()) == json.dumps(usual.to_json())
    assert run_swarm(spec(run={"seed": 1})).formed_s != usual.formed_s


CHURN = {"stays_s": 120.0, "away_s": 60.0}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trainer": {"step_s": 2.0}},
        {"workers": CHURN},
        {"workers": {"continuous": False}, "weights": {"delta_bytes": 0.0}},
        {"settings": {"coordinator": {"just_in_time": False}}, "validators": {"count": 1, "file_s": 1.0}},
    ],
    ids=["usual", "hungry-trainer", "churn", "slot-by-slot", "slow-validators"],
)
def test_the_store_of_a_run_gives_the_same_swarm(changes: dict[str, Any]) -> None:
    small = spec(**(changes | {"run": {"steps": 8}}))
    assert run_swarm(small, make=LocalCoordinator) == run_swarm(small)


def test_forgers_have_the_same_fate_with_the_store_of_a_run() -> None:
    mixed = tree(run={"steps": 8})
    mixed["workers"].append({"name": "forger", "count": 2, "tokens_per_s": 200, "rows": 8, "conduct": "forge"})
    mixed["workers"].append({"name": "staller", "count": 1, "tokens_per_s": 200, "conduct": "stall"})
    built = build_scenario(mixed)
    result = run_swarm(built)
    assert run_swarm(built, make=LocalCoordinator) == result
    assert result.banned == 2
    assert result.hostile == 3
    assert result.ban_after_s is not None
    assert result.hostile_trained < 0.1


def test_a_trainer_with_enough_workers_does_not_wait(usual: SwarmResult) -> None:
    assert usual.is_finished
    assert usual.step_s == pytest.approx(20.0, rel=0.05)
    assert usual.trainer_wait < 0.05
    assert usual.mean_age <= 2.0
    assert sum(usual.fates.values()) == pytest.approx(1.0)


def test_workers_whose_leases_wait_for_a_version_wait_for_the_trainer_not_for_weights() -> None:
    """Weights arrive within a second; the last answer before a lease is `need_weights` all the same."""
    idle = run_swarm(spec(run={"steps": 20}, trainer={"step_s": 60.0}))
    waits = idle.groups[0].waits
    assert idle.workers_wait > 0.5
    assert waits["trainer"] > 10 * waits.get("weights", 0.0)
    assert idle.starving == "workers"
    assert sum(idle.fates.values()) == pytest.approx(1.0)
    assert sum(waits.values()) == pytest.approx(idle.workers_wait)


def test_without_relays_the_rule_counts_usual_servers() -> None:
    alone = run_swarm(spec(run={"steps": 6}, origin={"up_mbit_s": 40_000.0}))
    assert "relay of 1,000 Mbit/s" in alone.sentence


def test_a_swarm_that_is_too_small_is_the_limit_and_the_rule_says_how_many_are_needed(usual: SwarmResult) -> None:
    slow = run_swarm(spec(workers={"count": 1}, settings={"trust": {"key_share": 1.0}}))
    assert slow.trainer_wait > 0.3
    assert slow.starving == "trainer"
    assert slow.needs.workers is not None
    assert slow.needs.workers > 1
    enough = run_swarm(spec(workers={"count": slow.needs.workers}))
    assert enough.trainer_wait < 0.15
    assert usual.needs.workers is not None
    assert usual.needs.workers <= 6


def test_validators_that_are_too_slow_are_named() -> None:
    slow = run_swarm(spec(validators={"count": 1, "file_s": 8.0}))
    assert slow.validators_busy > 0.9
    assert slow.starving == "validators"
    assert slow.needs.validators is not None
    assert slow.needs.validators > 1


def test_a_coordinator_without_time_for_heartbeats_slows_the_swarm_down(usual: SwarmResult) -> None:
    overloaded = run_swarm(spec(coordinator={"requests_per_s": 1.3}))
    assert overloaded.coordinator_load > 0.9
    assert overloaded.step_s > usual.step_s


def test_full_weights_over_a_thin_link_make_old_groups() -> None:
    thin = run_swarm(spec(weights={"delta_bytes": 0.0}, workers={"down_mbit_s": 40.0}, origin={"up_mbit_s": 1000.0}))
    assert thin.arrival_s == pytest.approx(20.3, rel=0.01)
    assert thin.mbytes_per_step["worker_down"] > 50
    assert thin.mean_age > 1.2


def test_a_slot_at_a_time_leaves_rows_idle() -> None:
    many = {"training": {"groups_per_step": 64}}  # several slots of each worker between two versions
    at_once = run_swarm(spec(trainer={"step_s": 1.0}, settings=many))
    one_by_one = run_swarm(spec(trainer={"step_s": 1.0}, settings=many, workers={"continuous": False}))
    assert one_by_one.groups[0].busy < at_once.groups[0].busy
    assert one_by_one.step_s > at_once.step_s


def test_a_swarm_in_which_nobody_stays_long_enough_is_stopped() -> None:
    hopping = run_swarm(spec(run={"steps": 4}, workers={"stays_s": 0.5, "away_s": 1000.0, "count": 2}))
    assert not hopping.is_finished
    assert hopping.needs.workers is None
    json.dumps(hopping.to_json())


@pytest.mark.parametrize("steps", [2, 3, 5])
def test_a_short_simulation_does_not_count_its_first_batch_as_a_step(steps: int) -> None:
    """Full weights take minutes to arrive, a step takes seconds."""
    short = run_swarm(spec(run={"steps": steps}, weights={"full_bytes": 1e10}))
    assert short.is_finished
    assert short.first_step_s > 500
    assert short.step_s <= short.slowest_step_s < 100


def test_ages_never_exceed_the_asynchrony_level() -> None:
    for level in (0, 1, 3):
        result = run_swarm(spec(settings={"training": {"async_level": level}}))
        assert result.is_finished
        assert max(result.ages) <= level
