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
    parents: list[int]
    """The place of the token before each on its path, always an earlier one; -1 where an output begins."""
    paths: list[list[int]]
    """Of each output the places of its tokens in the row."""

    @classmethod
    def of(cls, outputs: Sequence[Sequence[int]]) -> "PrefixTree":
        tree = cls.within(outputs, sum(map(len, outputs)))
        assert tree is not None
        return tree

    @classmethod
    def within(cls, outputs: Sequence[Sequence[int]], most: int) -> "PrefixTree | None":
        """None if there would be more tokens than `most`: what is never used costs nothing, however long outputs are.

        Python looks only at tokens that two outputs share; everything else is sorting and slices."""
        if max(map(len, outputs), default=0) > most:
            return None
        tree = cls([], [], [], [[] for _ in outputs])
        before, path = tuple[int, ...](), list[int]()
        for number in alphabetical(outputs):
            output, count = tuple(outputs[number]), len(tree.tokens)
            shared = common_length(before, output)
            added = range(count, count + len(output) - shared)
            if added.stop > most:
                return None
            path = [*path[:shared], *added]
            tree.tokens.extend(output[shared:])
            tree.depths.extend(range(shared, len(output)))
            tree.parents.extend([-1, *path][shared:-1])
            tree.paths[number], before = path, output
        return tree

    @classmethod
    def path(cls, output: Sequence[int]) -> "PrefixTree":
        """Of one output alone."""
        count = len(output)
        return cls([*output], [*range(count)], [*range(-1, count - 1)], [[*range(count)]])

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
    most = int(min(LARGEST_TREE, WORTH_SHARE * sum(map(len, outputs))))
    tree = PrefixTree.within(outputs, most)
    return [tree] if tree is not None else [PrefixTree.path(output) for output in outputs]


def visible(trees: Sequence[PrefixTree]) -> NDArray[np.bool_]:
    """[B, S, S]: true where a token sees another of its row; padding sees itself.

    A token sees itself and what its parent sees, so the time depends on the row alone, not on how many outputs share it.
    """
    longest = max(len(tree.tokens) for tree in trees)
    seen_BSS = np.zeros((len(trees), longest, longest), np.bool_)
    seen_BSS[:, np.arange(longest), np.arange(longest)] = True
    for seen_SS, tree in zip(seen_BSS, trees, strict=True):
        if tree.is_path:
            count = len(tree.tokens)
            seen_SS[:count, :count] = np.tri(count, dtype=np.bool_)
            continue
        for place, parent in enumerate(tree.parents):
            if parent >= 0:
                seen_SS[place, : parent + 1] = seen_SS[parent, : parent + 1]
    return seen_BSS
