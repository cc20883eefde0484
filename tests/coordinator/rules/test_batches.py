from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shoal.config import TrainingConfig
from shoal.coordinator.rules.batches import GroupView, StepView, decide

CONFIG = TrainingConfig(groups_per_step=4, oversampling=4.0, async_level=1)


def group(step: int, slot: int, number: int = 0, version: int | None = None) -> GroupView:
    return GroupView(step, slot, number, f"{step}/{slot}/{number}", step if version is None else version)


def view(*waiting: GroupView, step: int = 5, **changes: Any) -> StepView:
    fields: dict[str, Any] = {"blocking_slots": [], "outstanding_groups": 0, "judged_groups": len(waiting)}
    return StepView(step=step, waiting=waiting, **fields | changes)


def test_groups_enter_in_slot_order_whatever_the_order_of_arrival() -> None:
    arrived = [group(5, slot) for slot in (3, 0, 4, 2, 1)]
    assert decide(view(*arrived), CONFIG).batch == ("5/0/0", "5/1/0", "5/2/0", "5/3/0")


def test_a_slot_on_its_first_lease_holds_later_ones_back() -> None:
    arrived = [group(5, slot) for slot in (0, 2, 3, 4, 5)]
    waiting = decide(view(*arrived, blocking_slots=[1], outstanding_groups=1), CONFIG)
    assert waiting.batch is None
    assert decide(view(*arrived, blocking_slots=[6], outstanding_groups=1), CONFIG).batch is not None


def test_a_slot_that_was_dropped_once_holds_back_nobody() -> None:
    arrived = [group(5, slot) for slot in (0, 2, 3, 4)]
    assert decide(view(*arrived, blocking_slots=[], outstanding_groups=1), CONFIG).batch is not None


def test_blocking_slots_never_hold_back_groups_of_earlier_steps() -> None:
    carried = [group(4, slot) for slot in range(4)]
    assert decide(view(*carried, blocking_slots=[0], outstanding_groups=1), CONFIG).batch is not None


def test_groups_carried_over_come_first() -> None:
    waiting = [*(group(5, slot) for slot in range(4)), group(4, 9)]
    assert decide(view(*waiting), CONFIG).batch == ("4/9/0", "5/0/0", "5/1/0", "5/2/0")


def test_groups_older_than_the_window_expire_and_are_not_used() -> None:
    waiting = [group(4, 0, version=3), *(group(5, slot) for slot in range(3)), group(4, 1, version=4)]
    decision = decide(view(*waiting), CONFIG)
    assert decision.expired == ("4/0/0",)
    assert decision.batch == ("4/1/0", "5/0/0", "5/1/0", "5/2/0")
    assert decision.useful == 4


def test_a_synchronous_run_takes_only_the_current_version() -> None:
    waiting = [group(4, slot, version=4) for slot in range(4)] + [group(5, slot) for slot in range(4)]
    decision = decide(view(*waiting), CONFIG.model_copy(update={"async_level": 0}))
    assert decision.batch == ("5/0/0", "5/1/0", "5/2/0", "5/3/0")
    assert len(decision.expired) == 4


def test_at_the_cap_the_step_trains_on_what_there_is() -> None:
    assert decide(view(group(5, 0), judged_groups=16), CONFIG).batch == ("5/0/0",)
    assert decide(view(judged_groups=16), CONFIG).batch == ()


def test_at_the_cap_the_step_still_waits_for_what_is_on_its_way() -> None:
    decision = decide(view(group(5, 0), judged_groups=14, outstanding_groups=2), CONFIG)
    assert (decision.batch, decision.groups_wanted) == (None, 0)


def test_a_fresh_step_asks_for_enough_groups_at_a_useful_share_of_one_half() -> None:
    assert decide(view(), CONFIG).groups_wanted == 10


def test_groups_on_their_way_are_not_asked_for_again() -> None:
    assert decide(view(outstanding_groups=10, blocking_slots=[0]), CONFIG).groups_wanted == 0
    assert decide(view(outstanding_groups=6, blocking_slots=[0]), CONFIG).groups_wanted == 4


def test_few_useful_groups_ask_for_more_but_never_past_the_cap() -> None:
    poor = decide(view(group(5, 0), judged_groups=8), CONFIG).groups_wanted
    rich = decide(view(group(5, 0), group(5, 1), group(5, 2), judged_groups=3), CONFIG).groups_wanted
    assert rich < poor <= 8


@given(
    waiting=st.lists(
        st.tuples(st.integers(3, 5), st.integers(0, 9), st.integers(0, 3), st.integers(2, 5)), max_size=30
    ),
    blocking=st.lists(st.integers(0, 9), max_size=3),
    outstanding=st.integers(0, 12),
    judged=st.integers(0, 20),
)
def test_every_decision_keeps_the_rules(
    waiting: list[tuple[int, int, int, int]], blocking: list[int], outstanding: int, judged: int
) -> None:
    groups = {f"{step}/{slot}/{number}": group(step, slot, number, version) for step, slot, number, version in waiting}
    outstanding = max(outstanding, len(set(blocking)))
    decision = decide(
        view(*groups.values(), blocking_slots=blocking, outstanding_groups=outstanding, judged_groups=judged), CONFIG
    )
    assert all(groups[name].policy_version < 4 for name in decision.expired)
    if decision.batch is not None:
        chosen = [groups[name] for name in decision.batch]
        assert chosen == sorted(chosen)
        assert len(chosen) <= CONFIG.groups_per_step
        assert all(one.policy_version >= 4 for one in chosen)
        assert len(chosen) == CONFIG.groups_per_step or (outstanding == 0 and judged >= 16)
    elif outstanding == 0:
        assert decision.groups_wanted > 0, "a step that waits for nobody must ask for work"
    assert judged + outstanding + decision.groups_wanted <= max(16, judged + outstanding)
