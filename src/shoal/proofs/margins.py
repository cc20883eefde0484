"""Margins of claimed tokens by a compiled loop that computes noise only for tokens that can still be among the first three.

In: rows of logits / T; of each sample its row, the two halves of its key, the claimed token. Out: best score − claimed score, and
of the winner's two closest rivals how far their scores and their logits / T lie below the winner's.
The noise is bounded, so a token whose logit lies further below the third best score so far than the largest noise is none of them,
and its noise is never computed; most of a vocabulary falls away. Of those that are left the hash is computed, and its logarithms
only if its upper bits allow a score above the third. The hash is that of `noise`, bit for bit; logarithms may differ in the last
place.
"""

import math

import numpy as np
from numpy.typing import NDArray

from shoal.proofs.kernels import compiled
from shoal.proofs.noise import MUL_A, MUL_B, MUL_C, NOISE_BITS, TOKEN_STRIDE, UNIFORM_SCALE, UNIFORM_SHIFT

LARGEST_NOISE = np.float32(-math.log(-math.log1p(-(2.0 ** -(NOISE_BITS + 1)))) + 1e-3)
# The compiled loop needs the widths of its constants.
_SCALE, _SHIFT = np.float32(UNIFORM_SCALE), np.float32(UNIFORM_SHIFT)
_STRIDE, _MUL_A, _MUL_B, _MUL_C = (np.int32(value) for value in (TOKEN_STRIDE, MUL_A, MUL_B, MUL_C))
_DROPPED_BITS = 32 - NOISE_BITS
BOUND_BITS = 12
"""Upper bits of a hash by which its noise is bounded: the table of bounds stays in the first cache."""
_BOUND_SHIFT, _FIRST_BOUND = 32 - BOUND_BITS, 1 << (BOUND_BITS - 1)


@compiled
def hashed(token: int, low: np.int32, high: np.int32) -> np.int32:
    state = np.int32(np.int32(np.int32(token) * _STRIDE) + low)
    state = np.int32((state ^ np.int32(state >> 16)) * _MUL_A)
    state = np.int32(np.int32((state ^ np.int32(state >> 15)) + high) * _MUL_B)
    return np.int32((state ^ np.int32(state >> 16)) * _MUL_C)


@compiled
def noise_of(state: np.int32) -> np.float32:
    uniform = np.float32(np.float32(np.int32(state >> _DROPPED_BITS)) * _SCALE + _SHIFT)
    return np.float32(-np.log(-np.log(uniform)))


@compiled
def noise(token: int, low: np.int32, high: np.int32) -> np.float32:
    return noise_of(hashed(token, low, high))


def _noise_bounds() -> NDArray[np.float32]:
    """Of each value of the upper bits the largest noise of a hash that begins with them: noise grows with the signed hash."""
    upper = np.arange(-_FIRST_BOUND, _FIRST_BOUND, dtype=np.int64)
    last = ((upper + 1) << _BOUND_SHIFT) - 1
    uniform = (last >> _DROPPED_BITS).astype(np.float64) * UNIFORM_SCALE + UNIFORM_SHIFT
    return np.asarray(-np.log(-np.log(uniform)) + 1e-3, dtype=np.float32)


NOISE_BOUNDS = _noise_bounds()


@compiled
def fill_margins(
    scaled_NV: NDArray[np.float32],
    rows_R: NDArray[np.int64],
    low_R: NDArray[np.int32],
    high_R: NDArray[np.int32],
    tokens_R: NDArray[np.int64],
    margins_R: NDArray[np.float32],
    rivals_R4: NDArray[np.float32],
) -> None:
    """`rivals_R4` gets the two gaps of scores, then the two of logits / T; a rival that does not exist is infinitely far away."""
    none = np.float32(-np.inf)
    for sample in range(rows_R.shape[0]):
        row, low, high = rows_R[sample], low_R[sample], high_R[sample]
        claimed = scaled_NV[row, tokens_R[sample]] + noise(tokens_R[sample], low, high)
        broken = math.isnan(claimed)
        best, second, third = none, none, none
        best_value, second_value, third_value = none, none, none
        for token in range(scaled_NV.shape[1]):
            value = scaled_NV[row, token]
            if value + LARGEST_NOISE <= third:
                continue
            broken |= math.isnan(value)
            state = hashed(token, low, high)
            if value + NOISE_BOUNDS[(state >> _BOUND_SHIFT) + _FIRST_BOUND] <= third:
                continue
            score = value + noise_of(state)
            if score > best:
                best, second, third = score, best, second
                best_value, second_value, third_value = value, best_value, second_value
            elif score > second:
                second, third = score, second
                second_value, third_value = value, second_value
            elif score > third:
                third, third_value = score, value
        margins_R[sample] = np.float32(np.inf) if broken else best - claimed
        rivals_R4[sample, 0], rivals_R4[sample, 1] = best - second, best - third
        rivals_R4[sample, 2], rivals_R4[sample, 3] = best_value - second_value, best_value - third_value
