"""Outputs of one prompt that begin alike, as one row of tokens in which every shared prefix stands once. Pure integers.

A pass over such a row, in which each token sees the tokens before it on its own path and no others, computes what a pass over every
output computes. It reads fewer tokens, but attention grows with the square of the row: long rows stay apart.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LARGEST_TREE = 512
"""Tokens. Up to here attention costs less than the rest of a layer, whatever the width of the model."""
WORTH_SHARE = 0.8
"""Of the tokens that outputs have one by one: a tree with more of them saves less than its mask costs."""


@dataclass(frozen=True)
class PrefixTree:
    tokens: list[int]
    depths: list[int]
    """How many tokens of its output come before each."""
    paths: list[list[int]]
    """Of each output the places of its tokens in the row."""

    @classmethod
    def of(cls, outputs: Sequence[Sequence[int]]) -> "PrefixTree":
        """Python looks only at tokens that two outputs share; everything else is sorting and slices."""
        tree = cls([], [], [[] for _ in outputs])
        before, path = tuple[int, ...](), list[int]()
        for number in alphabetical(outputs):
            output = tuple(outputs[number])
            shared = common_length(before, output)
            path = [*path[:shared], *range(len(tree.tokens), len(tree.tokens) + len(output) - shared)]
            tree.tokens.extend(output[shared:])
            tree.depths.extend(range(shared, len(output)))
            tree.paths[number], before = path, output
        return tree

    @property
    def is_path(self) -> bool:
        """Whether every token sees all before it, as in a plain sequence."""
        return len(self.paths) == 1


def alphabetical(outputs: Sequence[Sequence[int]]) -> list[int]:
    """Numbers of the outputs in an order in which each shares its longest prefix with the one before it."""
    return sorted(range(len(outputs)), key=lambda number: tuple(outputs[number]))


def common_length(first: Iterable[int], second: Iterable[int]) -> int:
    """How many tokens two outputs share at their beginning."""
    shared = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        shared += 1
    return shared


def merged(outputs: Sequence[Sequence[int]]) -> list[PrefixTree]:
    """One tree of all outputs if that pays, else one of each."""
    tree = PrefixTree.of(outputs)
    if len(tree.tokens) <= min(LARGEST_TREE, WORTH_SHARE * sum(map(len, outputs))):
        return [tree]
    return [PrefixTree.of([output]) for output in outputs]


def visible(trees: Sequence[PrefixTree]) -> NDArray[np.bool_]:
    """[B, S, S]: true where a token sees another of its row; padding sees itself."""
    longest = max(len(tree.tokens) for tree in trees)
    seen_BSS = np.zeros((len(trees), longest, longest), np.bool_)
    seen_BSS[:, np.arange(longest), np.arange(longest)] = True
    for row, tree in enumerate(trees):
        for path in tree.paths:
            places = np.array(path, dtype=np.int64)
            later, earlier = np.tril_indices(len(path))
            seen_BSS[row, places[later], places[earlier]] = True
    return seen_BSS
