import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import TrainingConfig, TrustConfig
from shoal.coordinator.rules.batches import (
    Batch,
    GroupView,
    StepCounts,
    StepView,
    decide,
    groups_wanted,
    may_be_complete,
    refill,
    surplus,
)

CONFIG = TrainingConfig(groups_per_step=4, oversampling=4.0, async_level=1)
TRUST = TrustConfig(unaudited_share=0.5)


def group(step: int, slot: int, number: int = 0, version: int | None = None) -> GroupView:
    return GroupView(step, slot, number, f"{step}/{slot}/{number}", step if version is None else version)


def view(
    *waiting: GroupView,
    step: int = 5,
    blocking_slots: Sequence[int] = (),
    outstanding_groups: int = 0,
    resolved_groups: int | None = None,
) -> StepView:
    young = [one for one in waiting if one.policy_version >= step - CONFIG.async_level]
    of_step = sum(one.step == step for one in young)
    resolved = len(waiting) if resolved_groups is None else resolved_groups
    return StepView(step, StepCounts(len(young), of_step, outstanding_groups, resolved), waiting, blocking_slots)


def names(groups: Sequence[GroupView]) -> tuple[str, ...]:
    return tuple(one.group_id for one in groups)


def batch(view: StepView, config: TrainingConfig = CONFIG) -> Batch:
    decided = decide(view, config, TRUST)
    assert decided is not None
    return decided


def wanted(view: StepView) -> int:
    return groups_wanted(view.counts, CONFIG)


def test_groups_enter_in_slot_order_whatever_the_order_of_arrival() -> None:
    arrived = [group(5, slot) for slot in (3, 0, 4, 2, 1)]
    assert names(batch(view(*arrived)).groups) == ("5/0/0", "5/1/0", "5/2/0", "5/3/0")


def test_a_slot_on_its_first_lease_holds_later_ones_back() -> None:
    arrived = [group(5, slot) for slot in (0, 2, 3, 4, 5)]
    assert decide(view(*arrived, blocking_slots=[1], outstanding_groups=1), CONFIG, TRUST) is None
    assert decide(view(*arrived, blocking_slots=[6], outstanding_groups=1), CONFIG, TRUST) is not None


def test_a_slot_that_was_dropped_once_holds_back_nobody() -> None:
    arrived = [group(5, slot) for slot in (0, 2, 3, 4)]
    assert decide(view(*arrived, blocking_slots=[], outstanding_groups=1), CONFIG, TRUST) is not None


def test_blocking_slots_never_hold_back_groups_of_earlier_steps() -> None:
    carried = [group(4, slot) for slot in range(4)]
    assert decide(view(*carried, blocking_slots=[0], outstanding_groups=1), CONFIG, TRUST) is not None


def test_groups_carried_over_come_first() -> None:
    waiting = [*(group(5, slot) for slot in range(4)), group(4, 9)]
    assert names(batch(view(*waiting)).groups) == ("4/9/0", "5/0/0", "5/1/0", "5/2/0")


def test_groups_older_than_the_window_expire_and_are_not_used() -> None:
    waiting = [group(4, 0, version=3), *(group(5, slot) for slot in range(3)), group(4, 1, version=4)]
    decision = batch(view(*waiting))
    assert names(decision.expired) == ("4/0/0",)
    assert names(decision.groups) == ("4/1/0", "5/0/0", "5/1/0", "5/2/0")


def test_a_synchronous_run_takes_only_the_current_version() -> None:
    waiting = [group(4, slot, version=4) for slot in range(4)] + [group(5, slot) for slot in range(4)]
    decision = batch(view(*waiting), CONFIG.model_copy(update={"async_level": 0}))
    assert names(decision.groups) == ("5/0/0", "5/1/0", "5/2/0", "5/3/0")
    assert len(decision.expired) == 4


def test_at_the_cap_the_step_trains_on_what_there_is() -> None:
    assert names(batch(view(group(5, 0), resolved_groups=16)).groups) == ("5/0/0",)
    assert batch(view(resolved_groups=16)).groups == ()


def test_at_the_cap_the_step_still_waits_for_what_is_on_its_way() -> None:
    full = view(group(5, 0), resolved_groups=14, outstanding_groups=2)
    assert (decide(full, CONFIG, TRUST), wanted(full)) == (None, 0)


def test_a_fresh_step_asks_for_enough_groups_at_a_useful_share_of_one_half() -> None:
    assert wanted(view()) == 10


def test_a_fresh_step_asks_for_as_many_groups_as_the_usual_share_needs() -> None:
    counts = view().counts
    assert [groups_wanted(counts, CONFIG, share) for share in (None, 0.5, 0.99)] == [10, 13, 5]
    assert groups_wanted(counts, CONFIG, 0.99, has_time=True) == 5


@pytest.mark.parametrize(("groups_per_step", "share"), [(16, 0.85), (32, 0.8), (256, 0.5), (4096, 0.3)])
def test_a_measured_step_runs_short_rarely_and_makes_few_groups_too_many(groups_per_step: int, share: float) -> None:
    """Slots of eight groups that end one after the other; usefulness is drawn."""
    config = TrainingConfig(groups_per_step=groups_per_step, oversampling=8.0)
    rng, steps = random.Random(groups_per_step), 200 if groups_per_step < 1000 else 5
    short = generated = 0
    for _ in range(steps):
        useful = resolved = outstanding = 0
        while useful < groups_per_step:
            short += resolved > 0 and outstanding == 0
            while groups_wanted(StepCounts(useful, useful, outstanding, resolved), config, share) > 0:
                outstanding += 8
            outstanding, resolved = outstanding - 8, resolved + 8
            useful += sum(rng.random() < share for _ in range(8))
        generated += resolved + outstanding
    fewest = math.ceil(groups_per_step / share / 8) * 8
    assert short <= 0.1 * steps
    assert generated / steps <= 1.15 * fewest + 8


def test_a_step_whose_groups_are_suddenly_poor_is_filled_after_a_few_rounds() -> None:
    """A tenth is useful instead of four fifths, and all slots that are leased end together."""
    config, rng = TrainingConfig(groups_per_step=16, oversampling=16.0), random.Random(0)
    useful = resolved = rounds = 0
    while useful < 16:
        leased = groups_wanted(StepCounts(useful, useful, 0, resolved), config, 0.8)
        useful += sum(rng.random() < 0.1 for _ in range(leased))
        resolved, rounds = resolved + leased, rounds + 1
    assert rounds <= 6


def test_a_step_whose_groups_are_poorer_than_usual_still_asks_for_more() -> None:
    poor, rich = (view(group(5, 0), resolved_groups=resolved).counts for resolved in (8, 1))
    assert groups_wanted(poor, CONFIG, 0.9) > groups_wanted(rich, CONFIG, 0.9)


def test_groups_on_their_way_are_not_asked_for_again() -> None:
    assert wanted(view(outstanding_groups=10, blocking_slots=[0])) == 0
    assert wanted(view(outstanding_groups=6, blocking_slots=[0])) == 4


def test_few_useful_groups_ask_for_more_but_never_past_the_cap() -> None:
    poor = wanted(view(group(5, 0), resolved_groups=8))
    rich = wanted(view(group(5, 0), group(5, 1), group(5, 2), resolved_groups=3))
    assert rich < poor <= 8


@given(
    waiting=st.lists(
        st.tuples(st.integers(3, 5), st.integers(0, 9), st.integers(0, 3), st.integers(2, 5)), max_size=30
    ),
    blocking=st.lists(st.integers(0, 9), max_size=3),
    outstanding=st.integers(0, 12),
    resolved=st.integers(0, 20),
)
def test_every_decision_keeps_the_rules(
    waiting: list[tuple[int, int, int, int]], blocking: list[int], outstanding: int, resolved: int
) -> None:
    groups = {f"{step}/{slot}/{number}": group(step, slot, number, version) for step, slot, number, version in waiting}
    outstanding = max(outstanding, len(set(blocking)))
    now = view(*groups.values(), blocking_slots=blocking, outstanding_groups=outstanding, resolved_groups=resolved)
    decision, more = decide(now, CONFIG, TRUST), wanted(now)
    assert decision is None or may_be_complete(now.counts, CONFIG), "what may not be complete is not even read"
    if decision is not None:
        assert set(decision.expired) == {one for one in groups.values() if one.policy_version < 4}
        chosen = list(decision.groups)
        assert chosen == sorted(chosen)
        assert len(chosen) <= CONFIG.groups_per_step
        assert all(one.policy_version >= 4 for one in chosen)
        assert len(chosen) == CONFIG.groups_per_step or (outstanding == 0 and resolved >= 16)
    elif outstanding == 0:
        assert more > 0, "a step that waits for nobody must ask for work"
    assert resolved + outstanding + more <= max(16, resolved + outstanding)


def unaudited(step: int, slot: int, worker: str, number: int = 0) -> GroupView:
    return GroupView(step, slot, number, f"{step}/{slot}/{number}", step, worker=worker, audited=False)


def test_one_key_fills_no_more_than_its_share_of_a_batch_without_an_audit() -> None:
    """Three keys filled 90 % of a batch before."""
    config, trust = TrainingConfig(groups_per_step=10), TrustConfig(unaudited_share=0.1)
    eves = [unaudited(5, slot, f"eve-{slot % 3}", number) for slot in range(9) for number in range(2)]
    honest = [unaudited(5, 20 + slot, f"honest-{slot}") for slot in range(8)]
    now = StepView(5, StepCounts(26, 26, 0, 26), [*eves, *honest], ())
    decided = decide(now, config, trust)
    assert decided is not None
    workers = [one.worker for one in decided.groups]
    assert len(workers) == 10
    assert max(workers.count(name) for name in workers) == 1
    assert {one.worker for one in surplus(now, config, trust)} == {"eve-0", "eve-1", "eve-2"}


def test_audited_groups_fill_any_share() -> None:
    config, trust = TrainingConfig(groups_per_step=4), TrustConfig(unaudited_share=0.1)
    arrived = [group(5, slot) for slot in range(6)]
    decided = decide(view(*arrived), config, trust)
    assert decided is not None
    assert len(decided.groups) == 4


def test_a_refill_counts_what_the_batch_holds_of_a_key() -> None:
    config, trust = TrainingConfig(groups_per_step=4), TrustConfig(unaudited_share=0.25)
    kept = [unaudited(5, 0, "eve"), unaudited(5, 1, "ann")]
    waiting = [unaudited(5, 2, "eve"), unaudited(5, 3, "bob"), unaudited(5, 4, "cid"), unaudited(5, 5, "dan")]
    found = refill(view(*waiting), kept, config, trust)
    assert [one.worker for one in found] == ["bob", "cid"]


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_with_time_no_slot_begins_for_a_fraction_of_a_group(share: float) -> None:
    needed = CONFIG.groups_per_step
    enough = math.floor(needed / share)
    assert groups_wanted(StepCounts(0, 0, enough, 0), CONFIG, share, has_time=True) == 0
    assert groups_wanted(StepCounts(0, 0, enough - 1, 0), CONFIG, share, has_time=True) > 0


@given(
    useful=st.integers(0, 3), resolved=st.integers(0, 12), outstanding=st.integers(0, 12), share=st.floats(0.01, 0.99)
)
def test_a_step_that_lacks_groups_and_waits_for_none_wants_more(
    useful: int, resolved: int, outstanding: int, share: float
) -> None:
    """Whatever share was usual: the batch is formed in the end."""
    counts = StepCounts(useful, min(useful, resolved), 0, resolved)
    assert groups_wanted(counts, CONFIG, share) > 0
    more = groups_wanted(StepCounts(useful, min(useful, resolved), outstanding, resolved), CONFIG, share)
    assert more <= groups_wanted(counts, CONFIG, share)
