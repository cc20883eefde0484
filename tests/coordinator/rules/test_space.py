from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.rules.space import may_store, refused_bytes_to_remove

sizes = st.integers(0, 10_000)


def test_strangers_fill_at_most_half_of_the_space_that_others_need() -> None:
    assert may_store(1000, 100, 900, is_stranger=True)
    assert not may_store(899, 100, 901, is_stranger=True)
    assert may_store(899, 100, 901, is_stranger=False)
    assert not may_store(99, 100, 0, is_stranger=False)


@given(free=sizes, reserve=sizes, strangers=sizes)
def test_what_a_stranger_may_store_a_key_with_accepted_work_may_too(free: int, reserve: int, strangers: int) -> None:
    allowed = may_store(free, reserve, strangers, is_stranger=True)
    assert not allowed or may_store(free, reserve, strangers, is_stranger=False)
    assert not may_store(free, reserve, strangers, is_stranger=False) or free >= reserve


@given(free=sizes, reserve=sizes, refused=sizes)
def test_refused_files_keep_at_most_a_quarter_of_what_may_be_filled(free: int, reserve: int, refused: int) -> None:
    removed = refused_bytes_to_remove(free, reserve, refused)
    assert 0 <= removed <= refused
    spare = max(0, free - reserve) + refused
    assert refused - removed <= spare / 4 + 1
    assert removed == 0 or refused > spare / 4
