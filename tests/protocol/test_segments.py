import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.segments import (
    sampled_count,
    sampled_places,
    sampled_values,
    segment_complaint,
    split_segments,
    turn_count,
)

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=9).filter(lambda lengths: len(lengths) % 2 == 1)


def test_the_first_third_and_fifth_segments_are_sampled() -> None:
    lengths, tokens = [2, 3, 1, 1, 2], list("aaBBBaBaa")
    assert sampled_places(lengths) == [0, 1, 5, 7, 8]
    assert sampled_values(tokens, lengths) == list("aaaaa")
    assert [list(part) for part in split_segments(tokens, lengths)] == [["a"] * 2, ["B"] * 3, ["a"], ["B"], ["a"] * 2]
    assert (sampled_count(lengths), turn_count(lengths)) == (5, 3)


@given(LENGTHS)
def test_every_output_token_is_in_exactly_one_segment(lengths: list[int]) -> None:
    tokens = list(range(sum(lengths)))
    assert [token for part in split_segments(tokens, lengths) for token in part] == tokens
    assert len(sampled_values(tokens, lengths)) == sampled_count(lengths)
    assert not segment_complaint(lengths, len(tokens))


@pytest.mark.parametrize(
    "lengths", [[], [3, 2], [5, 0, 0], [0, 5, 0], [6, -1, 0], [4], [6], [2, 1, 1, 1], [2**31 - 1, 2**31 - 1, 7]]
)
def test_lengths_that_cannot_be_those_of_five_tokens_are_named(lengths: list[int]) -> None:
    assert segment_complaint(lengths, 5)
