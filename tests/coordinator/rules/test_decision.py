"""One pure function answers a request for work: may this key work, on what, with which version."""

from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import TrainingConfig, TrustConfig
from shoal.coordinator.rules.batches import StepCounts, groups_wanted
from shoal.coordinator.rules.leases import (
    DROPS_PER_STEP,
    LEASES_PER_KEY,
    POLLS_PER_S,
    Grant,
    KeyView,
    Refused,
    SwarmView,
    decide,
)
from shoal.protocol.api import RunState

TRAINING = TrainingConfig(groups_per_step=8, oversampling=4.0, async_level=1)
TRUST = TrustConfig(key_share=0.5, probation_share=0.25)
COUNTS = StepCounts(useful=0, useful_of_step=0, outstanding_groups=2, resolved_groups=0)
SWARM = SwarmView(
    run_state="running",
    step=5,
    steps=10,
    has_space=True,
    published=(4, 5),
    counts=COUNTS,
    next_slot=1,
    tasks_per_slot=2,
    keys_present=3,
    has_other_workers=True,
    has_other_active_workers=True,
)
KEY = KeyView(is_active=True, held_versions=(5,), leases_held=0, slots_of_step=0, drops_of_step=0, dropped_slot=None)


def answer(swarm: dict[str, Any] | None = None, **key: Any) -> Grant | Refused:
    return decide(replace(SWARM, **swarm or {}), replace(KEY, **key), TRAINING, TRUST)


def refusal(swarm: dict[str, Any] | None = None, **key: Any) -> str:
    refused = answer(swarm, **key)
    assert isinstance(refused, Refused)
    return refused.reason


def test_a_key_that_may_work_gets_the_next_slot_and_the_newest_version_it_holds() -> None:
    assert answer() == Grant(step=5, slot=1, version=5, wanted_version=5)
    assert answer(held_versions=(4,)) == Grant(step=5, slot=1, version=4, wanted_version=5)


def test_a_slot_that_others_dropped_comes_before_a_new_one() -> None:
    assert answer(dropped_slot=0) == Grant(step=5, slot=0, version=5, wanted_version=5)


@pytest.mark.parametrize(
    ("state", "reason"),
    [("paused", "paused"), ("draining", "draining"), ("drained", "draining"), ("finished", "finished")],
)
def test_a_run_that_does_not_run_says_so(state: str, reason: str) -> None:
    assert refusal({"run_state": state, "has_space": False, "published": ()}) == reason


def test_each_gate_has_its_reason() -> None:
    assert refusal({"step": 10, "has_space": False}) == "no_work"
    assert refusal({"has_space": False, "published": ()}) == "disk_full"
    assert refusal({"published": (3, 6)}) == "waiting_for_trainer"
    assert refusal(held_versions=(3, 6), leases_held=LEASES_PER_KEY) == "need_weights"
    assert refusal(leases_held=LEASES_PER_KEY) == "no_work"
    assert refusal({"counts": replace(COUNTS, useful=10)}) == "no_work"
    assert refusal(drops_of_step=DROPS_PER_STEP) == "no_work"
    assert refusal(slots_of_step=5) == "no_work"


def test_a_key_that_lacks_the_weights_learns_which_it_needs() -> None:
    assert answer(held_versions=()) == Refused("need_weights", 0.25, wanted_version=5)


def test_probation_shares_what_active_keys_leave() -> None:
    full = {"counts": replace(COUNTS, probation_slots=3)}
    assert refusal(full, is_active=False) == "no_work"
    assert isinstance(answer(full, is_active=True), Grant)
    assert isinstance(answer(full | {"has_other_active_workers": False}, is_active=False), Grant)


def test_idle_keys_of_a_large_swarm_ask_less_often() -> None:
    crowd = answer({"published": (), "keys_present": 100 * POLLS_PER_S})
    assert isinstance(crowd, Refused)
    assert crowd.retry_after_s == 100.0
    last = answer({"step": 10})
    assert isinstance(last, Refused)
    assert last.retry_after_s == 1.0


@given(
    run_state=st.sampled_from(["running", "paused", "draining", "drained", "finished"]),
    step=st.integers(0, 12),
    has_space=st.booleans(),
    published=st.lists(st.integers(0, 14), max_size=4),
    held=st.lists(st.integers(0, 14), max_size=4),
    numbers=st.tuples(*[st.integers(0, 20)] * 5),
    key=st.tuples(*[st.integers(0, 6)] * 3),
    dropped=st.none() | st.integers(0, 3),
    flags=st.tuples(*[st.booleans()] * 3),
)
def test_every_grant_keeps_every_rule(
    run_state: str,
    step: int,
    has_space: bool,
    published: list[int],
    held: list[int],
    numbers: tuple[int, ...],
    key: tuple[int, ...],
    dropped: int | None,
    flags: tuple[bool, ...],
) -> None:
    counts = StepCounts(*numbers)
    swarm = replace(
        SWARM,
        run_state=cast(RunState, run_state),
        step=step,
        has_space=has_space,
        published=published,
        counts=counts,
        has_other_workers=flags[0] or flags[1],
        has_other_active_workers=flags[1],
    )
    asking = KeyView(flags[2], held, key[0], key[1], key[2], dropped)
    decision = decide(swarm, asking, TRAINING, TRUST)
    if isinstance(decision, Refused):
        assert decision.retry_after_s > 0
        idle = counts.outstanding_groups == 0 and groups_wanted(counts, TRAINING) > 0
        if decision.reason == "no_work" and idle and step < swarm.steps and asking.leases_held < LEASES_PER_KEY:
            assert asking.drops_of_step >= DROPS_PER_STEP, "shares never stop a step that has nothing outstanding"
        return
    assert run_state == "running"
    assert has_space
    assert decision.step == step < swarm.steps
    assert decision.version in set(published) & set(held)
    assert step - TRAINING.async_level <= decision.version <= decision.wanted_version <= step
    assert decision.slot == (swarm.next_slot if dropped is None else dropped)
    assert asking.leases_held < LEASES_PER_KEY
    assert groups_wanted(counts, TRAINING) > 0
