"""The nastiest scenarios end, each with a sentence that says why."""

import json
from typing import Any

import pytest

from shoal.coordinator.rules import leases
from shoal.errors import ConfigError
from shoal.observe.simulated import simulated_curve, simulated_table
from shoal.simulation.swarm import run_swarm
from shoal.simulation.swarm.spec import build_scenario
from shoal.simulation.swarm.standstill import Standstill, most_events, sentence
from simulation.swarm.small import spec, tree

ENDLESS: dict[str, tuple[dict[str, Any], str]] = {
    "slower-than-the-lease": ({"workers": {"tokens_per_s": 0.01}}, "raise coordinator.lease_s"),
    "no-weights": ({"workers": {"down_mbit_s": 1e-6}}, "no worker has weights; the first ones take 9,259.3 days"),
    "gone-before-the-weights": (
        {"workers": {"stays_s": 1.0, "away_s": 1e7}},
        "the first ones take 8.3 s to arrive, and workers leave after 1.0 s",
    ),
    "no-uploads": (
        {"workers": {"up_mbit_s": 1e-12}},
        "days to upload and a lease lasts 5.0 min at most; raise up_mbit_s",
    ),
    "churn-faster-than-leases": (
        {"workers": {"tokens_per_s": 5, "stays_s": 20, "away_s": 300}},
        "workers leave before a slot is done",
    ),
    "churn-in-no-time": ({"workers": {"count": 1, "stays_s": 1e-300, "away_s": 1e-300}}, "come and go too fast"),
    "coordinator-asleep": ({"coordinator": {"requests_per_s": 1e-9}}, "requests wait for the coordinator"),
    "validators-asleep": (
        {"validators": {"file_s": 1e6}, "settings": {"validation": {"claim_s": 10_000_000}}},
        "validators are too slow",
    ),
}


@pytest.mark.parametrize("name", list(ENDLESS))
def test_a_swarm_without_progress_ends_with_its_reason(name: str) -> None:
    changes, reason = ENDLESS[name]
    result = run_swarm(spec(**({"run": {"steps": 3}} | changes)))
    assert not result.is_finished
    assert reason in result.stopped
    assert result.stopped.startswith("Stopped at step 0, after ")
    table = simulated_table(result)
    assert result.stopped in table
    assert "nan" not in table
    assert "inf " not in table
    assert simulated_curve(result) == ""
    assert "NaN" not in str(result.to_json())


def seen(**changes: Any) -> Standstill:
    usual: dict[str, Any] = {
        "step": 4,
        "seconds": 12_000.0,
        "events": 1000,
        "most_events": most_events(6),
        "versions_received": 1e6,
        "tokens_generated": 1e6,
        "tokens_late": 0.0,
        "tokens_lost": 0.0,
        "files": 30.0,
        "files_waiting": 0,
        "honest": 5,
        "slot_s": 20.0,
        "lease_s": 300.0,
        "stage_s": 1.0,
        "arrival_s": 3.0,
        "upload_s": 1.0,
        "stays_s": 0.0,
    }
    return Standstill(**(usual | changes))


def test_each_reason_has_its_sentence() -> None:
    assert sentence(seen()).startswith("Stopped at step 4, after 3.3 h without another one: what was accepted")
    assert "hostile or banned" in sentence(seen(honest=0))
    assert "leave before a slot is done, which takes 20.0 s" in sentence(seen(files=0.0, tokens_lost=9.0))
    assert "a slot takes 20.0 s and a lease lasts 5.0 min" in sentence(seen(files=0.0, tokens_late=9.0))
    assert "takes 30.0 s to upload and a lease lasts" in sentence(seen(files=0.0, tokens_late=9.0, upload_s=30.0))
    assert "the trainer takes 5.6 h to publish a version" in sentence(seen(stage_s=20_000.0))
    assert "20 files wait" in sentence(seen(files_waiting=20))
    assert "1,600,000 events" in sentence(seen(events=most_events(6)))


def test_workers_that_wait_for_hours_do_not_end_a_simulation() -> None:
    """28 idle nodes ask four times a second; each request is two events."""
    assert most_events(28) > 3 * 3600 * 28 * 4 * 2
    assert most_events(10_000) > 3 * 3600 * leases.POLLS_PER_S * 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"work": {"spread": float("nan")}}, "work.spread = nan is wrong"),
        ({"trainer": {"step_s": float("nan")}}, "trainer.step_s = nan is wrong"),
        ({"trainer": {"step_s": 1e300}}, "less than or equal to"),
        ({"workers": {"speed_spread": 1e9}}, "less than or equal to 5"),
        ({"workers": {"count": 10**30}}, "less than or equal to"),
        ({"workers": {"count": 300_000}}, "too many to simulate"),
        ({"workers": {"count": 100_000, "rows": 4096}}, "too many to simulate"),
        ({"workers": {"forged_share": float("nan")}}, "forged_share = nan is wrong"),
        ({"validators": {"count": 0}}, "Without a validator no file is accepted"),
        ({"run": {"steps": 10**9}}, "less than or equal to"),
        ({"settings": {"training": {"oversampling": float("nan")}}}, "oversampling"),
    ],
)
def test_values_that_no_clock_can_run_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_scenario(tree(**change))
    assert says in str(refusal.value)


def test_no_relay_is_written_by_leaving_it_out() -> None:
    with pytest.raises(ConfigError, match=r"leave \[\[relays\]\] out"):
        build_scenario(tree() | {"relays": [{"count": 0}]})
    assert run_swarm(build_scenario(tree(run={"steps": 4}) | {"relays": []})).is_finished


def test_a_trainer_that_never_publishes_is_named() -> None:
    """Workers hold the first version; what is missing is the second one."""
    result = run_swarm(spec(run={"steps": 3}, trainer={"stage_s": 1e5}))
    assert not result.is_finished
    assert "lower trainer.stage_s" in result.stopped


STRANGE: dict[str, dict[str, Any]] = {
    "one worker": {"workers": {"count": 1}},
    "one worker, lag 0": {"workers": {"count": 1}, "settings": {"training": {"async_level": 0}}},
    "one row": {"workers": {"rows": 1}},
    "a coordinator without limits": {"coordinator": {"requests_per_s": 1e15}},
    "answers of no length": {"work": {"median_tokens": 1e-9}},
    "answers without end": {"work": {"median_tokens": 1e15}},
    "a negative seed": {"run": {"steps": 3, "seed": -5}},
    "a seed of forty digits": {"run": {"steps": 3, "seed": 10**40}},
    "a million validators": {"validators": {"count": 1_000_000}},
    "no group with a signal": {"work": {"useful_share": 1e-12}},
    "a trainer in no time": {"trainer": {"step_s": 1e-9}},
    "machines of all speeds": {"workers": {"speed_spread": 5.0}},
}


@pytest.mark.parametrize("name", list(STRANGE))
def test_a_strange_swarm_still_ends_with_finite_numbers(name: str) -> None:
    result = run_swarm(spec(**({"run": {"steps": 3}} | STRANGE[name])))
    assert result.is_finished
    json.dumps(result.to_json(), allow_nan=False)
    assert "nan" not in simulated_table(result)


def test_a_swarm_of_mostly_hostile_keys_still_ends() -> None:
    mixed = tree(run={"steps": 4}, workers={"count": 1})
    for conduct in ("forge", "junk", "stall"):
        mixed["workers"].append({"name": conduct, "count": 3, "tokens_per_s": 200, "rows": 8, "conduct": conduct})
    result = run_swarm(build_scenario(mixed))
    assert result.is_finished
    assert result.hostile == 9
    assert 3 <= result.banned <= 6
