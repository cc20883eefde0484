"""Commitments as evidence for the sequential test: how far a worker's states lie from the validator's.

In: the difference of each chunk, and ladders that a calibration made of honest chunks. Out: one log-likelihood ratio. No model of
the differences is needed: a chunk that only a share p of honest chunks exceeds counts as the ratio 1 / (2·√p), whose expectation
over honest chunks is 1, whatever their distribution. Ladders have room for machines of the same class that round a little worse.
The ratio counts against workers that commit to what they computed; one that prefills the true model to prove leaves nothing here.
Chunks of different lengths are never compared, because short ones differ more.
"""

import bisect
import math
from collections.abc import Sequence

from shoal.proofs.commitments import CHUNK_TOKENS, ChunkDifference

LENGTHS = (8, 16, CHUNK_TOKENS, CHUNK_TOKENS + 1)
"""Ladders are made for chunks below each of these, in tokens; the last one for whole chunks."""
LEAST_CHUNKS = 63
"""Honest chunks of a length, below which nothing is said about it."""
WIDER, LEAST_DISTANCE = 1.25, 0.05
"""From the distances of honest chunks to the steps: other machines of the class were not measured."""
Ladder = list[float]
"""Step k is the distance that at most a share of 2⁻ᵏ⁻¹ of honest chunks exceeds."""


def distance(difference: ChunkDifference) -> float:
    """Mean error of a mantissa, and half a unit for each wrong exponent or sign."""
    return difference.mantissa_mean + 0.5 * (difference.exponent_mismatches + difference.sign_mismatches)


def ladders(distances: Sequence[float], tokens: Sequence[int]) -> list[Ladder]:
    """One per length, from honest chunks; empty where there were too few."""
    by_length: list[list[float]] = [[] for _ in LENGTHS]
    for one, count in zip(distances, tokens, strict=True):
        by_length[_length(count)].append(one)
    return [_ladder(sorted(values)) if len(values) >= LEAST_CHUNKS else [] for values in by_length]


def _ladder(ascending: Sequence[float]) -> Ladder:
    """A conformal p-value counts the new chunk among the honest ones, so the last step is the largest of all."""
    count, steps = len(ascending) + 1, int(math.log2(len(ascending) + 1))
    return [WIDER * ascending[-max(1, count >> (step + 1))] + LEAST_DISTANCE for step in range(steps)]


def _length(tokens: int) -> int:
    return bisect.bisect_right(LENGTHS, tokens)


def evidence(distances: Sequence[float], tokens: Sequence[int], known: Sequence[Ladder]) -> float:
    """Log-likelihood ratio of all chunks together."""
    if not known:
        return 0.0
    return sum(_ratio(one, known[_length(count)]) for one, count in zip(distances, tokens, strict=True))


def _ratio(one: float, ladder: Ladder) -> float:
    if not ladder:
        return 0.0
    return (0.5 * bisect.bisect_left(ladder, one) - 1) * math.log(2)
