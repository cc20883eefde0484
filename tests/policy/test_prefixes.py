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
