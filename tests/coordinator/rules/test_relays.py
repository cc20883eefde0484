"""Places in the list of relays: who gets one, and that no single stranger decides."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.rules.relays import (
    BAD_LASTS_S,
    GOOD_LASTS_S,
    JURY,
    NEWCOMERS,
    PER_ADDRESS,
    PLACES,
    TURN_S,
    Candidate,
    Success,
    Vote,
    measured,
    places,
    success,
)

NOW = 1_000_000.0
GOOD, BAD = Vote(NOW, is_good=True), Vote(NOW, is_good=False)


def newcomer(name: str, *, address: str = "", announced_at: float = NOW, turn_at: float | None = None) -> Candidate:
    return Candidate(name, address or name, announced_at, turn_at, is_owners=False, measured="unknown")


def serving(name: str) -> Candidate:
    return replace(newcomer(name), measured="serves")


def test_a_few_strangers_decide_nothing_and_a_majority_of_addresses_does() -> None:
    assert measured([BAD] * (JURY - 1), NOW) == "unknown"
    assert measured([GOOD] * (JURY - 1), NOW) == "unknown"
    assert measured([BAD, BAD, GOOD], NOW) == "fails"
    assert measured([BAD, GOOD, GOOD], NOW) == "serves"


def test_the_owners_roles_are_believed_against_any_number_of_strangers() -> None:
    own = replace(GOOD, is_owners=True)
    assert measured([own, *[BAD] * 100], NOW) == "serves"
    assert measured([replace(own, is_good=False), *[GOOD] * 100], NOW) == "fails"


def test_a_relay_that_failed_may_try_again_later_and_one_that_served_is_remembered_longer() -> None:
    assert measured([BAD] * 3, NOW + BAD_LASTS_S) == "fails"
    assert measured([BAD] * 3, NOW + BAD_LASTS_S + 1) == "unknown"
    assert measured([GOOD] * 3, NOW + GOOD_LASTS_S) == "serves"
    assert measured([GOOD] * 3, NOW + GOOD_LASTS_S + 1) == "unknown"


def test_false_relays_take_no_place_of_the_owner_or_of_those_that_serve() -> None:
    owner = replace(newcomer("owner"), is_owners=True, measured="fails")
    real = [serving(f"real-{number}") for number in range(40)]
    false = [newcomer(f"false-{number}", announced_at=0.0) for number in range(1000)]
    chosen = places([*false, *real, owner], NOW)
    assert {"owner", *(one.key for one in real)} <= set(chosen)
    assert len(chosen) == 1 + PLACES


def test_one_address_fills_a_few_places_of_newcomers() -> None:
    false = [newcomer(f"false-{number}", address="eve", announced_at=0.0) for number in range(64)]
    chosen = places([*false, newcomer("real")], NOW)
    assert "real" in chosen
    assert len(chosen) == PER_ADDRESS + 1


def test_newcomers_take_turns_so_that_false_ones_do_not_stay() -> None:
    false = [newcomer(f"false-{number}", announced_at=NOW - 9, turn_at=NOW - 9) for number in range(PLACES)]
    real = newcomer("real", announced_at=NOW)
    assert "real" not in places([*false, real], NOW)
    assert "real" in places([*false, real], NOW - 9 + TURN_S)


def test_measured_relays_leave_places_for_newcomers() -> None:
    chosen = places([serving(f"real-{number:03}") for number in range(200)] + [newcomer("new")], NOW)
    assert "new" in chosen
    assert len(chosen) == PLACES - NEWCOMERS + 1


def test_a_relay_that_fails_has_no_place() -> None:
    assert places([replace(newcomer("bad"), measured="fails")], NOW) == []


candidates = st.lists(
    st.builds(
        Candidate,
        st.integers(0, 200).map(str),
        st.sampled_from("abc"),
        st.floats(0, NOW),
        st.none() | st.floats(0, NOW),
        st.booleans(),
        st.sampled_from(["serves", "fails", "unknown"]),
    ),
    unique_by=lambda one: one.key,
    max_size=150,
)


@given(candidates)
def test_the_list_is_bounded_and_names_each_once(known: list[Candidate]) -> None:
    chosen = places(known, NOW)
    owners = [one.key for one in known if one.is_owners]
    assert len(set(chosen)) == len(chosen) <= PLACES + len(owners)
    assert set(owners) <= set(chosen)


def test_success_is_the_mean_of_those_who_decide_whatever_number_of_requests_they_claim() -> None:
    liar = Vote(NOW, is_good=False, served=0, failed=1 << 53)
    good = Vote(NOW, is_good=True, served=9, failed=1)
    assert success([good, good], NOW) is None, "too few strangers"
    assert success([good, good, liar], NOW) == Success((0.9 + 0.9 + 0.0) / 3, 3)
    assert success([replace(good, is_owners=True), *[liar] * 9], NOW) == Success(0.9, 1)
    assert success([replace(good, at=NOW - GOOD_LASTS_S - 1)] * 3, NOW) is None
    assert success([GOOD] * 3, NOW) is None, "nobody asked it for anything"


def test_newer_reports_weigh_more_and_old_ones_are_forgotten() -> None:
    first = Vote(NOW, is_good=True, served=10, failed=0)
    second = replace(first, served=0, failed=10).after(first)
    assert (second.served, second.failed) == (9.0, 10.0)
    later = replace(first, at=NOW + GOOD_LASTS_S + 1)
    assert later.after(second) == later
    assert first.after(None) == first
