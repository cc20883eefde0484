from collections.abc import Iterator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.policy.prefixes import LARGEST_TREE, PrefixTree, merged, visible

OUTPUTS = st.lists(st.lists(st.integers(0, 2), max_size=8), min_size=1, max_size=6)


@given(OUTPUTS)
def test_every_output_is_a_path_and_every_prefix_stands_once(outputs: list[list[int]]) -> None:
    tree = PrefixTree.of(outputs)
    assert [[tree.tokens[place] for place in path] for path in tree.paths] == outputs
    assert all([tree.depths[place] for place in path] == list(range(len(path))) for path in tree.paths)
    assert all(parent < place for place, parent in enumerate(tree.parents))
    assert len(tree.tokens) == len({tuple(output[:end]) for output in outputs for end in range(1, len(output) + 1)})


@given(st.lists(OUTPUTS, min_size=1, max_size=3))
def test_a_token_sees_what_comes_before_it_on_its_path_and_nothing_else(rows: list[list[list[int]]]) -> None:
    trees = [PrefixTree.of(outputs) for outputs in rows]
    seen_BSS = visible(trees)
    for tree, seen_SS in zip(trees, seen_BSS, strict=True):
        for path in tree.paths:
            for count, place in enumerate(path, start=1):
                assert np.flatnonzero(seen_SS[place]).tolist() == sorted(path[:count])


def test_outputs_that_share_little_or_are_long_stay_apart() -> None:
    assert [tree.paths for tree in merged([[1, 2, 3], [1, 2, 4]])] == [[[0, 1, 2], [0, 1, 3]]]
    assert all(tree.is_path for tree in merged([[1, 2, 3, 4, 5], [1, 3, 4, 5, 6]]))
    long = list(range(LARGEST_TREE + 1))
    assert all(tree.is_path for tree in merged([long, long[:-1]]))


@given(OUTPUTS, st.integers(0, 40))
def test_a_tree_that_grows_too_large_is_dropped(outputs: list[list[int]], most: int) -> None:
    whole = PrefixTree.of(outputs)
    assert PrefixTree.within(outputs, most) == (whole if len(whole.tokens) <= most else None)


@given(st.lists(st.integers(0, 2), max_size=8))
def test_one_output_is_a_plain_path(output: list[int]) -> None:
    assert PrefixTree.path(output) == PrefixTree.of([output])


def test_long_outputs_are_not_made_into_a_tree_before_it_is_dropped() -> None:
    """A group of thousands of tokens each would take hundreds of bytes for every one of them."""

    class Read(list[int]):
        reads = 0

        def __iter__(self) -> Iterator[int]:
            for token in super().__iter__():
                Read.reads += 1
                yield token

    outputs = [Read(range(number, number + 4000)) for number in range(64)]
    assert PrefixTree.within(outputs, LARGEST_TREE) is None
    assert Read.reads <= LARGEST_TREE + 1


def test_outputs_that_differ_in_their_last_token_alone_cost_one_row() -> None:
    """The most that one row can hold: many outputs, each nearly as long as the row."""
    shared = list(range(LARGEST_TREE - 64))
    (tree,) = merged([[*shared, 1000 + number] for number in range(64)])
    assert len(tree.tokens) == LARGEST_TREE
    (seen_SS,) = visible([tree])
    assert np.array_equal(seen_SS[-64:, :-64], np.ones((64, len(shared)), np.bool_))
    assert np.array_equal(seen_SS[-64:, -64:], np.eye(64, dtype=np.bool_))


def test_empty_outputs_take_no_place() -> None:
    assert [tree.tokens for tree in merged([[], []])] == [[]]
    (tree,) = merged([[], [1, 2], [1, 2, 3], [1, 2]])
    assert (tree.tokens, tree.paths) == ([1, 2, 3], [[], [0, 1], [0, 1, 2], [0, 1]])
