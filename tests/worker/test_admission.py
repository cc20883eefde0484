"""What enters the engine next, and when the next lease is due."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.tasks.workload import WorkItem
from shoal.worker.admission import UNDELIVERED, EngineView, Lengths, Rates, entry_order, leases_wanted, slot_s
from support.tiny_run import TinyRun

FULL = EngineView(
    rows=8,
    unfinished=8,
    waiting=4,
    slot_samples=8,
    undelivered=0,
    has_newer_weights=False,
    ends_per_s=1.0,
    lease_s=0.1,
)


def wanted(**changes: float) -> int:
    return leases_wanted(replace(FULL, **changes))  # type: ignore[arg-type]


@pytest.fixture
def items(tiny_run: TinyRun) -> list[WorkItem]:
    """Two groups; the second one is asked for longer answers."""
    made = tiny_run.workload.items(bytes(32))
    return [replace(item, target_length=(16, 32)[item.group]) for item in made]


def test_a_full_engine_with_samples_waiting_takes_no_lease() -> None:
    assert wanted() == 0


def test_the_next_lease_is_taken_just_before_the_samples_run_out() -> None:
    assert wanted(waiting=1) == 0
    assert wanted(waiting=0) == 1


def test_a_lease_that_takes_long_to_arrive_is_asked_for_earlier() -> None:
    assert wanted(waiting=4, lease_s=3.0) == 1
    assert wanted(waiting=4, ends_per_s=30.0) == 1


def test_an_empty_engine_is_filled_at_once() -> None:
    assert wanted(rows=64, unfinished=0, waiting=0) == 9
    assert wanted(rows=64, unfinished=32, waiting=8) == 4


def test_while_rows_of_the_old_version_run_no_lease_is_taken() -> None:
    assert wanted(has_newer_weights=True, unfinished=1, waiting=0) == 0
    assert wanted(has_newer_weights=True, unfinished=0, waiting=3) == 0
    assert wanted(has_newer_weights=True, unfinished=0, waiting=0) == 2, "while the weights are loaded"


def test_slots_that_cannot_be_delivered_stop_further_leases() -> None:
    assert wanted(unfinished=0, waiting=0, undelivered=UNDELIVERED) == 0


@given(
    st.integers(1, 512), st.integers(0, 512), st.integers(0, 2000), st.floats(0, 1e6), st.floats(0, 1e4), st.booleans()
)
def test_what_is_held_stays_within_twice_the_rows_and_a_slot(
    rows: int, unfinished: int, waiting: int, ends_per_s: float, lease_s: float, newer: bool
) -> None:
    view = EngineView(rows, min(unfinished, rows), waiting, 8, 0, newer, ends_per_s, lease_s)
    count = leases_wanted(view)
    assert count >= 0
    assert count == 0 or waiting + 8 * count <= 2 * rows + 8


def test_samples_that_are_expected_to_take_long_enter_first_and_groups_stay_together(items: list[WorkItem]) -> None:
    lengths = Lengths(longest=100)
    for target_length, tokens in ((16, 10), (32, 50)):
        lengths.observe(target_length, tokens)
    order = [items[at].group for at in entry_order(items, lengths)]
    assert order == [1, 1, 1, 1, 0, 0, 0, 0]
    lengths = Lengths(longest=100)
    assert [items[at].group for at in entry_order(items, lengths)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_lengths_follow_what_is_observed() -> None:
    lengths = Lengths(longest=100)
    assert lengths.expected(16) == 100
    assert not lengths.is_known
    for _ in range(100):
        lengths.observe(16, 20)
    assert lengths.expected(16) == pytest.approx(20)
    assert lengths.expected(32) == pytest.approx(20), "the longest that is known"
    for _ in range(100):
        lengths.observe(16, 40)
    assert lengths.expected(16) == pytest.approx(40, abs=0.1)


def test_a_slot_takes_as_long_as_its_longest_expected_sample(items: list[WorkItem]) -> None:
    lengths = Lengths(longest=100)
    lengths.observe(16, 10)
    lengths.observe(32, 50)
    assert slot_s(items, lengths, step_s=0.5) == pytest.approx(25)


def test_rates_are_running_means() -> None:
    rates = Rates()
    for _ in range(500):
        rates.stepped(0.1, ended=2)
    assert rates.step_s == pytest.approx(0.1)
    assert rates.ends_per_s == pytest.approx(20)
    rates.leased(4.0)
    rates.leased(2.0)
    assert 2.0 < rates.lease_s < 4.0
