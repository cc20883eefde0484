import pytest

from shoal.coordinator.rules.credit import share, split_credit


@pytest.mark.parametrize(
    ("held", "earned", "expected"), [(0, 10, (10, 0)), (25, 10, (5, 5)), (30, 10, (0, 10)), (0, 0, (0, 0))]
)
def test_credit_beyond_the_stake_is_released(held: int, earned: int, expected: tuple[int, int]) -> None:
    assert split_credit(held, earned, stake_tokens=30) == expected


def test_a_lowered_stake_releases_what_is_held_beyond_it() -> None:
    assert split_credit(100, 10, stake_tokens=30) == (-70, 80)


@pytest.mark.parametrize(
    ("files", "held", "expected"), [(1, 1000, 50), (2, 1000, 25), (3, 1000, 16), (1, 20, 20), (1, 0, 0)]
)
def test_a_further_file_shares_what_is_still_held(files: int, held: int, expected: int) -> None:
    assert share(100, files, held) == expected


def test_all_shares_together_are_less_than_the_slot_paid() -> None:
    assert sum(share(1000, files, 10_000) for files in range(1, 4)) < 1000
