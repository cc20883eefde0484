from hypothesis import given
from hypothesis import strategies as st

from shoal.policy.scoring import length_batches


@given(st.lists(st.integers(1, 50)), st.integers(1, 120))
def test_batches_hold_everything_once_and_stay_within_the_limit(lengths: list[int], token_limit: int) -> None:
    batches = list(length_batches(dict(enumerate(lengths)), token_limit))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[index] for index in batch) * len(batch) <= token_limit


def test_neighbours_have_similar_lengths() -> None:
    assert list(length_batches({"a": 9, "b": 1, "c": 8, "d": 2}, 18)) == [["b", "d"], ["c", "a"]]
