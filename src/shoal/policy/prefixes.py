"""Outputs of one prompt that begin alike, as one row of tokens in which every shared prefix stands once. Pure integers.

A pass over such a row, in which each token sees the tokens before it on its own path and no others, computes what a pass over every
output computes. It reads fewer tokens, but attention grows with the square of the row: long rows stay apart.
"""

from collections.abc import Sequence
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
        tree, places = cls([], [], []), dict[tuple[int, int], int]()
        for output in outputs:
            place, path = -1, list[int]()
            for depth, token in enumerate(output):
                place = places.setdefault((place, token), len(tree.tokens))
                if place == len(tree.tokens):
                    tree.tokens.append(token)
                    tree.depths.append(depth)
                path.append(place)
            tree.paths.append(path)
        return tree

    @property
    def is_path(self) -> bool:
        """Whether every token sees all before it, as in a plain sequence."""
        return len(self.paths) == 1


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
