"""Who wins a draw, without drawing for everybody: a compiled loop over tokens that can still beat the claimed one.

In: rows of logits / T; of each draw its row, the two halves of its key, the claimed token. Out: by how much that token lost.
The noise is bounded, so a token whose logit lies further below the best score so far than the largest noise cannot win, and its
noise is never computed; most of a vocabulary falls away. The hash is that of `sampling`, bit for bit; logarithms may differ in
the last place.
"""

import math

import numpy as np
from numpy.typing import NDArray

from shoal.proofs.kernels import compiled

NOISE_BITS = 23
LARGEST_NOISE = np.float32(-math.log(-math.log1p(-(2.0 ** -(NOISE_BITS + 1)))) + 1e-3)
_SCALE, _SHIFT = np.float32(2.0**-NOISE_BITS), np.float32(0.5 + 2.0 ** -(NOISE_BITS + 1))
_TOKEN, _MUL_A, _MUL_B, _MUL_C = (np.int32(value) for value in (-0x61C8864F, 0x7FEB352D, -0x7B935975, -0x3D4D51CB))


@compiled
def noise(token: int, low: np.int32, high: np.int32) -> np.float32:
    state = np.int32(np.int32(np.int32(token) * _TOKEN) + low)
    state = np.int32((state ^ np.int32(state >> 16)) * _MUL_A)
    state = np.int32(np.int32((state ^ np.int32(state >> 15)) + high) * _MUL_B)
    state = np.int32((state ^ np.int32(state >> 16)) * _MUL_C)
    uniform = np.float32(np.float32(np.int32(state >> 9)) * _SCALE + _SHIFT)
    return np.float32(-np.log(-np.log(uniform)))


@compiled
def lost_margins(
    scaled_NV: NDArray[np.float32],
    rows_R: NDArray[np.int64],
    low_R: NDArray[np.int32],
    high_R: NDArray[np.int32],
    tokens_R: NDArray[np.int64],
    margins_R: NDArray[np.float32],
) -> None:
    for draw in range(rows_R.shape[0]):
        row, low, high = rows_R[draw], low_R[draw], high_R[draw]
        claimed = scaled_NV[row, tokens_R[draw]] + noise(tokens_R[draw], low, high)
        best, broken = claimed, math.isnan(claimed)
        for token in range(scaled_NV.shape[1]):
            value = scaled_NV[row, token]
            if value + LARGEST_NOISE <= best:
                continue
            broken |= math.isnan(value)
            best = max(best, value + noise(token, low, high))
        margins_R[draw] = np.float32(np.inf) if broken else best - claimed
