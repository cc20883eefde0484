"""One pure function answers a request for work: may this key work, on what, with which version."""

from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import TrainingConfig, TrustConfig
from shoal.coordinator.rules.batches import Deferred, StepCounts, counts_of_next, deferred_wanted, groups_wanted
from shoal.coordinator.rules.leases import (
    POLLS_PER_S,
    Grant,
    KeyView,
    NextStep,
    OpenSlot,
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
    settled_version=None,
    counts=COUNTS,
    next_slot=1,
    tasks_per_slot=2,
    keys_polling=3,
    has_other_workers=True,
    has_other_active_workers=True,
)
KEY = KeyView(is_active=True, held_versions=(5,), leases_held=0, leases_allowed=2, slots_of_step=0)


def answer(swarm: dict[str, Any] | None = None, **key: Any) -> Grant | Refused:
    return decide(SWARM._replace(**swarm or {}), replace(KEY, **key), TRAINING, TRUST)


def refusal(swarm: dict[str, Any] | None = None, **key: Any) -> str:
    refused = answer(swarm, **key)
    assert isinstance(refused, Refused)
    return refused.reason


def test_a_key_that_may_work_gets_the_next_slot_and_the_newest_version_it_holds() -> None:
    assert answer() == Grant(step=5, slot=1, version=5, wanted_version=5)
    assert answer(held_versions=(4,)) == Grant(step=5, slot=1, version=4, wanted_version=5)


def test_a_slot_that_others_dropped_comes_before_a_new_one() -> None:
    assert answer(open_slot=OpenSlot(0, 5)) == Grant(step=5, slot=0, version=5, wanted_version=5)


def test_a_dropped_slot_keeps_its_version_if_the_next_key_holds_it() -> None:
    again = Grant(step=5, slot=0, version=4, wanted_version=5)
    assert answer(open_slot=OpenSlot(0, 4), held_versions=(4, 5)) == again
    assert answer(open_slot=OpenSlot(0, 4), held_versions=(5,)) == replace(again, version=5)
    assert answer(open_slot=OpenSlot(0, 3), held_versions=(3, 5)) == replace(again, version=5)


def test_a_key_that_names_only_versions_that_everybody_has_replaced_gets_nothing() -> None:
    assert answer({"settled_version": 4}, held_versions=(4,)) == answer(held_versions=(4,))
    assert answer({"settled_version": 5}, held_versions=(4,)) == Refused("need_weights", 0.25, wanted_version=5)
    assert isinstance(answer({"settled_version": 5}, held_versions=(4, 5)), Grant)
    assert answer({"settled_version": 4}, held_versions=(4, 5)) == answer()


def test_a_late_slot_comes_before_everything_else() -> None:
    late = OpenSlot(0, 4)
    assert answer(late_slot=late, open_slot=OpenSlot(1, 5)) == Grant(step=5, slot=0, version=4, wanted_version=5)
    assert isinstance(answer({"counts": replace(COUNTS, useful=99)}, late_slot=late, slots_of_step=9), Grant)
    assert refusal(late_slot=late, leases_held=2) == "no_work"
    assert refusal(late_slot=late, backoff_s=1.0) == "no_work"


def test_new_work_waits_for_the_version_that_arrives_in_time_and_late_slots_do_not() -> None:
    assert refusal({"awaited_version": 6}) == "waiting_for_trainer"
    assert refusal({"awaited_version": 5}, held_versions=(4,)) == "need_weights"
    assert answer({"awaited_version": 5}) == answer()
    assert isinstance(answer({"awaited_version": 6}, late_slot=OpenSlot(0, 4)), Grant)


def test_a_key_that_is_not_reliable_works_for_the_next_step() -> None:
    assert answer(is_reliable=False) == Grant(step=5, slot=1, version=5, wanted_version=5, deferred=True)
    full = {"counts": replace(COUNTS, useful=10)}
    assert isinstance(answer(full, is_reliable=False), Grant)
    ahead = {"counts": replace(COUNTS, deferred=Deferred(useful=10))}
    assert refusal(ahead, is_reliable=False) == "no_work"


NOTHING = StepCounts(useful=0, useful_of_step=0, outstanding_groups=0, resolved_groups=0)
UNDER_WAY: dict[str, Any] = {"counts": replace(COUNTS, outstanding_groups=20), "ahead": NextStep(NOTHING, next_slot=0)}
"""All that the step needs is being worked on, while the trainer waits for it."""


def test_a_reliable_key_begins_with_the_next_step_when_all_groups_of_this_one_are_under_way() -> None:
    assert answer(UNDER_WAY) == Grant(step=6, slot=0, version=5, wanted_version=5)
    assert answer(UNDER_WAY | {"ahead": NextStep(NOTHING, next_slot=3)}) == Grant(6, 3, 5, 5)
    assert answer(UNDER_WAY, open_slot_of_next=OpenSlot(1, 5)) == Grant(6, 1, 5, 5)
    assert answer(UNDER_WAY, open_slot=OpenSlot(1, 5)) == Grant(6, 0, 5, 5), (
        "a slot of this step is not one of the next"
    )


def test_nobody_begins_with_the_next_step_while_this_one_needs_work_or_the_trainer_is_busy() -> None:
    assert answer(UNDER_WAY | {"counts": COUNTS}) == answer()
    assert refusal(UNDER_WAY | {"ahead": None}) == "no_work"


def test_a_key_that_this_step_does_not_admit_is_not_sent_to_the_next_one() -> None:
    assert refusal(UNDER_WAY | {"counts": COUNTS}, slots_of_step=5) == "no_work"
    assert answer(UNDER_WAY, is_reliable=False) == Grant(5, 1, 5, 5, deferred=True), (
        "its groups wait for the next step anyway"
    )
    assert refusal(UNDER_WAY, leases_held=2) == "no_work"
    assert refusal(UNDER_WAY, held_versions=(4,)) == "no_work", "its groups would be older than need be"
    assert refusal(UNDER_WAY, backoff_s=1.0) == "no_work"


def test_the_next_step_has_the_same_shares_and_no_surplus() -> None:
    counts = replace(NOTHING, outstanding_groups=4)
    begun = UNDER_WAY | {"ahead": NextStep(counts, next_slot=2)}
    assert isinstance(answer(begun, slots_of_next=1), Grant)
    assert refusal(begun, slots_of_next=9) == "no_work"
    enough = UNDER_WAY | {"ahead": NextStep(replace(NOTHING, outstanding_groups=16), next_slot=8)}
    assert refusal(enough) == "no_work", "eight useful groups are expected, and eight are needed"


def test_what_this_step_will_probably_leave_is_not_made_again() -> None:
    following = replace(NOTHING, useful=1)
    left = counts_of_next(replace(COUNTS, useful=4, outstanding_groups=20), following, TRAINING, usual_share=0.5)
    assert left == replace(following, useful=1 + 4 + 10 - 8)
    assert counts_of_next(replace(COUNTS, outstanding_groups=2), following, TRAINING, usual_share=0.5) == following


def test_slots_of_stallers_are_not_counted_on() -> None:
    held = {"counts": replace(COUNTS, deferred=Deferred(outstanding_groups=100))}
    assert isinstance(answer(held), Grant)


def test_a_key_holds_as_many_leases_as_its_record_allows() -> None:
    assert isinstance(answer(leases_held=1), Grant)
    assert isinstance(answer(leases_held=8, leases_allowed=9), Grant)
    assert refusal(leases_held=9, leases_allowed=9) == "no_work"
    assert refusal(leases_held=1, leases_allowed=1, is_reliable=False) == "no_work"


def test_a_key_that_keeps_failing_waits_while_others_work() -> None:
    waiting = answer(backoff_s=12.0)
    assert isinstance(waiting, Refused)
    assert (waiting.reason, waiting.retry_after_s) == ("no_work", 12.0)
    long = answer(backoff_s=3600.0)
    assert isinstance(long, Refused)
    assert long.retry_after_s == 30.0
    assert isinstance(answer({"has_other_workers": False}, backoff_s=12.0), Grant)


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
    assert refusal(held_versions=(3, 6), leases_held=2) == "need_weights"
    assert refusal(leases_held=2) == "no_work"
    assert refusal({"counts": replace(COUNTS, useful=10)}) == "no_work"
    assert refusal(slots_of_step=5) == "no_work"


def test_a_key_that_lacks_the_weights_learns_which_it_needs() -> None:
    assert answer(held_versions=()) == Refused("need_weights", 0.25, wanted_version=5)


def test_probation_shares_what_active_keys_leave() -> None:
    full = {"counts": replace(COUNTS, probation_slots=3)}
    assert refusal(full, is_active=False) == "no_work"
    assert isinstance(answer(full, is_active=True), Grant)
    assert isinstance(answer(full | {"has_other_active_workers": False}, is_active=False), Grant)


def test_idle_keys_of_a_large_swarm_ask_less_often() -> None:
    crowd = answer({"published": (), "keys_polling": 100 * POLLS_PER_S})
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
    ahead=st.tuples(*[st.integers(0, 20)] * 3),
    key=st.tuples(*[st.integers(0, 6)] * 3),
    dropped=st.none() | st.builds(OpenSlot, st.integers(0, 3), st.integers(0, 14)),
    flags=st.tuples(*[st.booleans()] * 4),
    following=st.none() | st.tuples(*[st.integers(0, 20)] * 4),
)
def test_every_grant_keeps_every_rule(
    run_state: str,
    step: int,
    has_space: bool,
    published: list[int],
    held: list[int],
    numbers: tuple[int, int, int, int, int],
    ahead: tuple[int, ...],
    key: tuple[int, ...],
    dropped: OpenSlot | None,
    flags: tuple[bool, ...],
    following: tuple[int, int, int, int] | None,
) -> None:
    useful, of_step, outstanding, resolved, probation = numbers
    counts = StepCounts(useful, of_step, outstanding, resolved, probation, Deferred(*ahead))
    swarm = SWARM._replace(
        run_state=cast(RunState, run_state),
        step=step,
        has_space=has_space,
        published=published,
        counts=counts,
        ahead=NextStep(StepCounts(*following), 7) if following is not None else None,
        has_other_workers=flags[0] or flags[1],
        has_other_active_workers=flags[1],
    )
    allowed = 2 if flags[3] else 1
    asking = KeyView(
        flags[2], held, key[0], allowed, key[1], dropped, is_reliable=flags[3], backoff_s=float(key[2] // 5)
    )
    decision = decide(swarm, asking, TRAINING, TRUST)
    if isinstance(decision, Refused):
        assert decision.retry_after_s > 0
        idle = counts.outstanding_groups == 0 and groups_wanted(counts, TRAINING) > 0
        may_hold = asking.is_reliable and asking.leases_held < asking.leases_allowed
        if decision.reason == "no_work" and idle and step < swarm.steps and may_hold:
            assert asking.backoff_s > 0, "shares never stop a step that has nothing outstanding"
        return
    assert run_state == "running"
    assert has_space
    assert decision.version in set(published) & set(held)
    assert step - TRAINING.async_level <= decision.version <= decision.wanted_version <= step < swarm.steps
    if decision.step != step:
        assert decision == Grant(step + 1, 7, step, step)
        assert following is not None
        assert asking.is_reliable
        assert asking.leases_held < asking.leases_allowed
        assert groups_wanted(counts, TRAINING) == 0
        return
    assert decision.slot == (swarm.next_slot if dropped is None else dropped.slot)
    assert asking.leases_held < asking.leases_allowed
    assert decision.deferred == (not asking.is_reliable)
    assert (groups_wanted if asking.is_reliable else deferred_wanted)(counts, TRAINING) > 0
