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
    after_tokens,
    are_all_current,
    backoff_s,
    is_current,
    is_enforced,
    is_reliable,
    lease_s,
    leases_allowed,
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


def test_every_key_counts_until_a_third_of_the_deliveries_comes_from_reliable_keys() -> None:
    proven, new = after(Record(), "iii"), after(Record(), "i")
    assert not is_enforced([], PACE)
    assert not is_enforced([new] * 9, PACE)
    assert not is_enforced([proven, *[new] * 6], PACE)
    assert is_enforced([proven, *[new] * 5], PACE)


def test_a_crowd_of_keys_that_deliver_little_does_not_put_all_keys_on_the_critical_path() -> None:
    proven, crowd = after(Record(), "i" * 32), after(Record(), "ii")
    unsteady = after(Record(), "iiif" * 8)
    assert is_enforced([*[proven] * 4, *[crowd] * 60], PACE)
    assert is_enforced([*[proven] * 4, *[unsteady] * 8], PACE)


def test_a_key_takes_part_while_it_is_silent_for_no_longer_than_a_lease_of_its_own() -> None:
    assert is_current(Record(work_s=10.0), 40.0, 120.0)
    assert not is_current(Record(work_s=10.0), 40.1, 120.0)
    assert is_current(Record(work_s=0.1), SHORTEST_LEASE_S, 120.0)
    assert not is_current(Record(work_s=1e6), 120.1, 120.0), "no longer than the longest lease"


@given(st.floats(0, 1e4), st.floats(0, 2000), st.floats(1, 1e5))
def test_a_silence_that_is_short_for_all_is_short_for_each(work_s: float, silence_s: float, longest_s: float) -> None:
    if are_all_current(silence_s, longest_s):
        assert is_current(Record(work_s=work_s), silence_s, longest_s)


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


class Machine:
    """A key that works on `at_once` slots side by side, each for ten seconds."""

    def __init__(self, at_once: int) -> None:
        self.record, self.seconds, self.at_once = Record(), 10.0, at_once

    def deliver(self, held: int, rounds: int = 40) -> Record:
        """Holds that number of slots; they end one by one, evenly spread, with 100 tokens each."""
        running = min(self.at_once, held)
        gap_s = self.seconds / running
        for _ in range(rounds):
            self.record = after_delivery(self.record, gap_s * held, PACE_OF_100)
            self.record = after_tokens(self.record, 100, gap_s)
        return self.record


PACE_OF_100 = replace(PACE, slot_tokens=100.0)


def allowed(record: Record) -> int:
    return leases_allowed(record, PACE_OF_100, reliable=True)


def test_a_key_without_a_record_holds_two_leases_and_one_that_is_not_reliable_one() -> None:
    assert leases_allowed(Record(), PACE, reliable=True) == 2
    assert leases_allowed(Record(), PACE_OF_100, reliable=True) == 2
    assert leases_allowed(Record(), PACE_OF_100, reliable=False) == 1


def test_a_machine_that_works_on_many_slots_at_once_gets_as_many_within_a_few_rounds() -> None:
    machine, held = Machine(at_once=32), 2
    for _ in range(8):
        held = allowed(machine.deliver(held))
    assert held >= 32


def test_a_machine_that_works_on_one_slot_after_the_other_holds_two_leases() -> None:
    assert allowed(Machine(at_once=1).deliver(1)) == 2


def test_leases_that_only_wait_in_a_key_do_not_let_it_hold_more_and_more() -> None:
    machine, held = Machine(at_once=2), 2
    for _ in range(30):
        held = allowed(machine.deliver(held))
    assert held <= 12, "the wait counts up to twice the limit of being in time"


def test_what_a_key_may_hold_follows_its_deliveries_and_not_its_claims() -> None:
    fast, slow = Machine(at_once=8).deliver(8), Machine(at_once=8)
    slow.seconds = 20.0
    assert fast.tokens_per_s == pytest.approx(2 * slow.deliver(8).tokens_per_s, rel=0.01)


def test_files_that_arrive_together_count_their_time_once() -> None:
    record = after_tokens(after_tokens(Record(), 100, 10.0), 100, 0.0)
    assert record.tokens_per_s == pytest.approx(20, rel=0.05)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.floats(-100, 1000)), max_size=30))
def test_no_record_of_tokens_allows_less_than_the_fewest(files: list[tuple[int, float]]) -> None:
    record = Record()
    for tokens, seconds in files:
        record = after_tokens(after_delivery(record, max(0.0, seconds), PACE_OF_100), tokens, seconds)
    assert record.busy_s >= 0
    assert allowed(record) >= 2
