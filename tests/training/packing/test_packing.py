"""Bins: everything exactly once, never over budget, ranks of equal load."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.policy.batching import length_batches
from shoal.training.packing.bins import SHORTEST_SHARE
from shoal.training.packing.packing import (
    balance,
    first_fit_decreasing,
    group_by_prompt,
    pack,
    pack_padded,
)

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(SIZES, st.integers(1, 80))
def test_first_fit_decreasing_keeps_every_item_and_the_budget(sizes: list[int], capacity: int) -> None:
    bins = first_fit_decreasing(sizes, capacity)
    assert sorted(item for chosen in bins for item in chosen) == list(range(len(sizes)))
    assert all(len(chosen) == 1 or sum(sizes[item] for item in chosen) <= capacity for chosen in bins)


def test_first_fit_decreasing_fills_bins_well() -> None:
    assert len(first_fit_decreasing([4, 8, 1, 4, 2, 1], 10)) == 2


@given(SIZES, st.integers(1, 8))
def test_balanced_loads_differ_by_at_most_the_largest_item(sizes: list[int], parts: int) -> None:
    loads = [sum(sizes[item] for item in share) for share in balance(sizes, parts)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes)


def unlike(lengths: list[int]) -> list[list[int]]:
    """Completions that share nothing."""
    return [[number] * length for number, length in enumerate(lengths)]


DRAWN = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=12)), min_size=1, max_size=30
)


@given(DRAWN, st.integers(1, 60))
def test_families_share_a_prompt_and_hold_every_completion_once(
    drawn: list[tuple[int, list[int]]], capacity: int
) -> None:
    prompts = [[kind] * (kind + 1) for kind, _ in drawn]
    outputs = [output for _, output in drawn]
    prompt_groups = group_by_prompt(prompts, outputs, capacity)
    assert sorted(member for group in prompt_groups for member in group.members) == list(range(len(drawn)))
    for group in prompt_groups:
        assert len({tuple(prompts[member]) for member in group.members}) == 1
        prefixes = {tuple(outputs[member][:end]) for member in group.members for end in range(1, len(outputs[member]))}
        assert group.tokens == group.prompt_length + len(prefixes)
        assert len(group.members) == 1 or group.size <= capacity
        assert group.tokens <= group.size


@given(SIZES, st.integers(1, 80), st.integers(1, 5), st.booleans())
def test_every_rank_has_equally_many_bins_and_nothing_is_trained_twice(
    lengths: list[int], capacity: int, ranks: int, padded: bool
) -> None:
    prompt_groups = group_by_prompt([[1]] * len(lengths), unlike(lengths), capacity, share=not padded)
    packed = (pack_padded if padded else pack)(prompt_groups, capacity, parts=ranks)
    assert len({len(bins) for bins in packed}) == 1
    members = [member for bins in packed for chosen in bins for group in chosen for member in group.members]
    assert sorted(members) == list(range(len(lengths)))


@given(SIZES)
def test_rows_of_a_block_have_similar_lengths(lengths: list[int]) -> None:
    blocks = list(length_batches(dict(enumerate(lengths)), shortest_share=SHORTEST_SHARE))
    assert sorted(row for block in blocks for row in block) == list(range(len(lengths)))
    for block in blocks:
        assert lengths[block[0]] == max(lengths[row] for row in block)
        assert min(lengths[row] for row in block) >= 0.75 * lengths[block[0]]


def test_ranks_are_balanced_by_cost_with_attention() -> None:
    """By tokens alone the rank with the long row had several times the work of the other."""
    prompts = [[number] for number in range(9)]
    lengths = [8000, *[1000] * 8]
    groups = group_by_prompt(prompts, unlike(lengths), 16_384, share=False)
    attention = 1 / 1000
    loads = {}
    for name, weight in (("tokens", 0.0), ("cost", attention)):
        ranks = pack(groups, 16_384, parts=2, attention=weight)
        loads[name] = [sum(group.cost(attention) for chosen in bins for group in chosen) for bins in ranks]
    assert max(loads["tokens"]) > 2.5 * min(loads["tokens"])
    assert max(loads["cost"]) <= max(group.cost(attention) for group in groups)


def test_every_row_attends_to_its_prompt() -> None:
    (group,) = group_by_prompt([[1, 2, 3]] * 2, [[4, 5, 6], [7, 8]], 100)
    assert group.tokens == 3 + 2 + 1
    assert group.pairs == 5 * 6 // 2 + 4 * 5 // 2


def test_what_completions_share_counts_once_and_equal_ones_attend_once() -> None:
    (group,) = group_by_prompt([[1, 2, 3]] * 4, [[4, 5, 6], [4, 9], [4, 5, 6], [4, 5, 7]], 100)
    assert group.tokens == 3 + 2
    assert group.members == (0, 2, 3, 1)
    assert group.pairs == 5 * 6 // 2
    assert group.repeated == 0


def test_a_bin_counts_what_attention_gathers_again() -> None:
    """Or a group whose completions share most of their tokens would fit a bin that its memory does not fit."""
    beginning = list(range(590))
    outputs = [[*beginning, 1000 + number, 0] for number in range(8)]
    (group,) = group_by_prompt([[1] * 10] * 8, outputs, 10_000)
    assert group.tokens == 10 + 590 + 8
    assert group.repeated == 7 * 600
    assert [len(group.members) for group in group_by_prompt([[1] * 10] * 8, outputs, 1000)] == [4, 4]
