"""Leases just in time, as workers, owners and a restarted coordinator see them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.coordinator.batching.timing import LeaseTiming
from shoal.protocol.client import CoordinatorClient
from support.swarm import Swarm, running, small_config

FILL_S, TRAIN_S = 1.0, 10.0


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    config = small_config(run={"steps": 50}, training={"async_level": 2, "groups_per_step": 2, "oversampling": 4.0})
    with running(tmp_path, config) as swarm:
        swarm.alter(timing=LeaseTiming())
        yield swarm


def fill(swarm: Swarm, worker: CoordinatorClient, *held: int) -> int:
    """A batch from one slot, in the usual time; returns the version that was leased."""
    lease, _ = swarm.work(worker, *held)
    swarm.clock.advance(FILL_S)
    swarm.accept()
    return lease.policy_version


def four_cycles(swarm: Swarm) -> CoordinatorClient:
    """Afterwards version 4 is out and the trainer waits for the batch of step 4."""
    (ann,) = swarm.join("ann")
    for step in range(4):
        swarm.publish(step)
        fill(swarm, ann)
        swarm.clock.advance(TRAIN_S)
    swarm.publish(4)
    return ann


def reason(swarm: Swarm) -> str:
    timing = swarm.client("trainer").status().lease_timing
    assert timing is not None
    return timing.reason


def test_work_waits_for_the_next_version_once_cycles_were_measured(swarm: Swarm) -> None:
    ann = four_cycles(swarm)
    assert fill(swarm, ann) == 4  # the trainer waited
    assert reason(swarm) == "trainer_waits"
    stale = swarm.ask(ann, 2, 3)
    assert (stale.reason, stale.wanted_version) == ("need_weights", 4)
    assert fill(swarm, ann) == 4
    ahead = swarm.ask(ann, 3, 4)
    assert (ahead.reason, ahead.wanted_version) == ("waiting_for_trainer", 4)
    assert reason(swarm) == "waits_for_version"
    swarm.clock.advance(TRAIN_S - FILL_S)
    swarm.publish(5)
    assert swarm.ask(ann, 3, 4).reason == "need_weights"
    assert fill(swarm, ann, 4, 5) == 5


def test_a_trainer_that_is_late_does_not_stop_the_swarm(swarm: Swarm) -> None:
    ann = four_cycles(swarm)
    fill(swarm, ann)
    fill(swarm, ann)
    assert swarm.ask(ann, 4).reason == "waiting_for_trainer"
    swarm.clock.advance(2 * TRAIN_S)
    lease = swarm.lease(ann, 4)
    assert (lease.step, lease.policy_version) == (6, 4)
    assert reason(swarm) == "late"


def test_after_a_restart_work_is_leased_at_once(swarm: Swarm) -> None:
    ann = four_cycles(swarm)
    fill(swarm, ann)
    fill(swarm, ann)
    assert swarm.ask(ann, 4).reason == "waiting_for_trainer"
    swarm.alter(timing=LeaseTiming())
    assert swarm.lease(ann, 4).step == 6
    assert reason(swarm) == "measuring"


def test_status_and_events_tell_decision_and_inputs(swarm: Swarm) -> None:
    assert swarm.client("trainer").status().lease_timing is None
    ann = four_cycles(swarm)
    fill(swarm, ann)
    fill(swarm, ann)
    swarm.ask(ann, 4)
    timing = swarm.client("trainer").status().lease_timing
    assert timing is not None
    assert (timing.step, timing.newest_version, timing.oldest_version) == (6, 4, 5)
    assert (timing.slowest_fill_s, timing.fastest_train_s) == (FILL_S, TRAIN_S)
    assert timing.cycles == 4
    assert timing.useful_share is not None
    assert 0.5 < timing.useful_share < 1  # every group so far was useful
    assert timing.waits_s is not None
    assert 0 < timing.waits_s < 2 * TRAIN_S
    assert swarm.run.metrics.counters["lease_timing"] == 3  # measuring, the trainer waits, work waits


def test_without_the_rule_the_swarm_runs_ahead(swarm: Swarm) -> None:
    ann = four_cycles(swarm)
    swarm.alter(timing=None)
    assert [fill(swarm, ann, 3) for _ in range(2)] == [3, 3]
