"""Who is reliable, how long leases last, and how long a key that keeps failing waits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.rules.deliveries import (
    FIRST_BACKOFF_S,
    FREE_FAILURES,
    LONGEST_BACKOFF_S,
    SHORTEST_LEASE_S,
    Pace,
    Record,
    after_delivery,
    after_failure,
    after_first_use,
    backoff_s,
    is_enforced,
    is_reliable,
    lease_s,
    pace,
)

PACE = Pace(work_s=10.0, missed_limit=0.1, longest_s=120.0)


def after(record: Record, outcomes: str) -> Record:
    """Deliveries in time (i) and late ones (l), and failures (f)."""
    for outcome in outcomes:
        late_s = 30.0 if outcome == "l" else 10.0
        record = after_failure(record, 100.0) if outcome == "f" else after_delivery(record, late_s, PACE)
    return record


@pytest.mark.parametrize(
    ("outcomes", "reliable"),
    [
        ("", False),
        ("ii", False),
        ("iii", True),
        ("iiif", False),
        ("iiifi", False),
        ("iiif" + "i" * 20, True),
        ("i" * 40 + "f", True),
        ("i" * 40 + "ff", True),
        ("i" * 40 + "ffff", False),
        ("l" * 20, False),
        ("if" * 30, False),
        ("lii" * 20, False),
    ],
)
def test_a_key_is_reliable_by_its_recent_deliveries_in_time(outcomes: str, reliable: bool) -> None:
    assert is_reliable(after(Record(), outcomes), PACE) == reliable


def test_bad_luck_is_forgiven_by_work_and_old_merit_fades() -> None:
    stalled = after(after(Record(), "i" * 100), "f" * 10)
    assert not is_reliable(stalled, PACE)
    assert is_reliable(after(stalled, "i" * 60), PACE)


def test_half_of_the_keys_cannot_move_the_pace() -> None:
    honest, slow = Record(in_time=9, work_s=10.0, lag_s=1.0), Record(in_time=9, missed=9, work_s=1e6, lag_s=1e6)
    swift = Record(in_time=9, work_s=1e-6, lag_s=0.0)
    usual = pace([honest] * 5, 120.0)
    assert pace([honest] * 5 + [slow] * 4, 120.0) == usual
    assert pace([honest] * 5 + [swift] * 4, 120.0) == usual
    assert (usual.work_s, usual.in_time_s, usual.grace_s) == (10.0, 15.0, 2.0)


def test_where_lengths_vary_much_nobody_is_unreliable_for_being_late_at_times() -> None:
    varied = [after(Record(), "iiil" * 8)] * 5
    assert all(is_reliable(record, pace(varied, 120.0)) for record in varied)
    assert not is_reliable(after(Record(), "ill" * 16), pace(varied, 120.0))


def test_every_key_counts_until_a_third_of_those_that_deliver_is_reliable() -> None:
    proven, new = after(Record(), "iii"), after(Record(), "i")
    assert not is_enforced([], PACE)
    assert not is_enforced([proven, new, new, new], PACE)
    assert is_enforced([proven, new, new], PACE)


def test_a_lease_lasts_by_observation() -> None:
    unknown = Pace(work_s=None, missed_limit=0.1, longest_s=120.0)
    assert lease_s(Record(), unknown) == 30.0
    assert lease_s(Record(), PACE) == 40.0
    assert lease_s(Record(work_s=25.0), PACE) == 100.0
    assert lease_s(Record(work_s=0.001), PACE) == SHORTEST_LEASE_S
    assert lease_s(Record(work_s=1e9), PACE) == 120.0


def test_a_slow_machine_gets_longer_leases_until_it_delivers() -> None:
    record = Record()
    lengths = []
    for _ in range(3):
        lengths.append(lease_s(record, PACE))
        record = after_failure(record, 0.0)
    assert lengths == [40.0, 80.0, 120.0]
    assert lease_s(after_delivery(record, 95.0, PACE), PACE) == 120.0


def test_the_wait_doubles_with_failures_and_halves_with_deliveries() -> None:
    record = after(Record(), "f" * FREE_FAILURES)
    assert backoff_s(replace(record, failures=FREE_FAILURES - 1), 100.0) == 0.0
    assert backoff_s(record, 100.0) == FIRST_BACKOFF_S
    assert backoff_s(record, 104.0) == FIRST_BACKOFF_S - 4.0
    twice = after(record, "ff")
    assert backoff_s(twice, 100.0) == 4 * FIRST_BACKOFF_S
    assert backoff_s(after(twice, "i"), 100.0) == 2 * FIRST_BACKOFF_S
    assert backoff_s(after(record, "f" * 3000), 100.0) == LONGEST_BACKOFF_S


def test_a_key_that_declines_more_than_every_second_slot_is_shut_out() -> None:
    chooser = after(Record(), "ffi" * 20)
    assert backoff_s(chooser, 100.0) == LONGEST_BACKOFF_S


def test_the_lag_of_a_version_is_observed() -> None:
    assert after_first_use(Record(), 8.0).lag_s == 8.0
    assert after_first_use(Record(lag_s=0.0), 8.0).lag_s == 2.0
    assert after_first_use(Record(), -3.0).lag_s == 0.0
    assert pace([], 120.0).grace_s == 120.0
    assert pace([Record(lag_s=8.0)], 120.0).grace_s == 16.0
    assert pace([Record(lag_s=800.0)], 120.0).grace_s == 120.0


@given(st.text("ilf", max_size=200))
def test_whatever_happens_limits_stay_within_their_bounds(outcomes: str) -> None:
    record = after(Record(), outcomes)
    assert 0 <= record.missed_share <= 1
    assert record.in_time + record.missed <= 32
    assert SHORTEST_LEASE_S <= lease_s(record, PACE) <= PACE.longest_s
    assert 0 <= backoff_s(record, 100.0) <= LONGEST_BACKOFF_S
