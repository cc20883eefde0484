"""Bit-exact differences between two versions of the same numbers.

TensorBits are compared as bit patterns, ordered like the numbers they stand for. An update smaller than half a unit in the last
place vanishes in the cast, so whether a weight changed, and by how many units, follows mostly from its exponent, which both
sides know: numbers are coded in four bands of magnitude, the one nearest to zero densely with the exponent as context, the
others as the gaps between changes. Any bits survive: NaN payloads, −0.0, denormals.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.broadcast.codec import kernels
from shoal.broadcast.codec.entropy import Reader, corrupt, read_stream, varint, write_stream
from shoal.broadcast.codec.kernels import CONTEXTS
from shoal.broadcast.codec.pieces import Bits, Layout

# Where nearly every number changes, a step for each is cheaper than gaps.
DENSE_RATE = 0.25


def encode_changes(pairs: Sequence[tuple[Bits, Bits]], layout: Layout) -> bytes:
    """What turns every first array into its second; the pairs are coded as if they were one long pair."""
    cut_exponent = choose_cut(pairs, layout)
    return varint(cut_exponent) + b"".join(map(write_stream, change_streams(pairs, layout, cut_exponent)))


def change_streams(pairs: Sequence[tuple[Bits, Bits]], layout: Layout, cut_exponent: int) -> list[NDArray[np.uint32]]:
    """Gaps and steps of the sparse changes, then the steps of all numbers below the cut, one stream per context."""
    size = sum(len(base) for base, _ in pairs)
    # As large as they could ever become; only the pages that are used cost memory.
    dense, contexts = np.empty(size, np.uint32), np.empty(size, np.uint8)
    gaps, steps = np.empty(size, np.uint32), np.empty(size, np.uint32)
    out = kernels.Collected(dense, contexts, gaps, steps, np.zeros(3, np.int64))
    for base, new in pairs:
        kernels.collect(base, new, _numbers(layout, cut_exponent), out)
    near_zero, sparse = int(out.cursors[0]), int(out.cursors[1])
    dense, contexts = dense[:near_zero], contexts[:near_zero]
    return [gaps[:sparse], steps[:sparse], *(dense[contexts == context] for context in range(CONTEXTS))]


class Changes:
    """What `encode_changes` wrote: turns the first arrays into the second ones, in place, in parts of any size."""

    def __init__(self, reader: Reader, size: int, layout: Layout) -> None:
        """`size` is how many numbers all arrays have together."""
        self._numbers = _numbers(layout, reader.varint(layout.exponents))
        self._gaps, self._steps = read_stream(reader, size), read_stream(reader, size)
        streams = [read_stream(reader, size) for _ in range(CONTEXTS)]
        if len(self._gaps) != len(self._steps):
            raise corrupt("gaps and steps differ in number")
        self._dense = np.concatenate(streams)
        self._ends = np.cumsum([len(stream) for stream in streams])
        self._dense_cursors = np.concatenate([[0], self._ends[:-1]])
        self._sparse_cursors = np.zeros(2, np.int64)

    def apply(self, array: Bits) -> None:
        """Change the numbers that follow those of the last call."""
        # Dense first: a sparse step may carry a number below the cut, never the other way round for one that was below.
        if kernels.patch_dense(array, self._numbers, self._dense, self._dense_cursors, self._ends) == kernels.CORRUPT:
            raise corrupt("it has too few steps for the numbers near zero")
        kernels.patch_sparse(array, self._numbers.width, self._gaps, self._steps, self._sparse_cursors)

    def finish(self) -> None:
        if (self._dense_cursors != self._ends).any() or self._sparse_cursors[0] != len(self._gaps):
            raise corrupt("it describes changes beyond the end")


def _numbers(layout: Layout, cut_exponent: int) -> kernels.Numbers:
    word = np.uint16 if layout.width == 16 else np.uint32
    cut = word(cut_exponent << layout.exponent_shift)
    return kernels.Numbers(layout.width, layout.exponent_shift, word(layout.magnitude), cut)


def choose_cut(pairs: Sequence[tuple[Bits, Bits]], layout: Layout) -> int:
    """The exponent below which numbers change often, measured on a sample."""
    members, changes = np.zeros(layout.exponents, np.int64), np.zeros(layout.exponents, np.int64)
    for base, new in pairs:
        kernels.survey(base, new, layout.exponent_shift, layout.magnitude, members, changes)
    often = np.flatnonzero(changes > DENSE_RATE * members)
    return int(often[-1]) + 1 if len(often) else 0
