"""The noise of seeded sampling: Gumbel noise as a function of public integers, and the one place that defines its hash.

In: a 64-bit sampling seed, the 0-based index of the output token, a token id. Out: g = −log(−log u), u made of 23 hash bits.
The bits are identical in torch, numpy and the compiled loop of `margins`, on every device and in any batch; only the two
logarithms may differ in the last place. `gumbel_noise`, `hash_bits` and `hash_bits_np` are test vectors for the others.

Hash: one 64-bit mix per row gives two 32-bit keys; each token id then passes a 32-bit finaliser into which the keys
enter at two points, so rows share no streams. All shifts keep the sign (torch has no unsigned ones; the steps stay
bijective). Seeds in torch are the two's complement of the unsigned ones.

Shapes: R samples (one output position of one completion each), V vocabulary entries.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

NOISE_BITS = 23
UNIFORM_SCALE, UNIFORM_SHIFT = 2.0**-NOISE_BITS, 0.5 + 2.0 ** -(NOISE_BITS + 1)
"""From centred hash bits to u in (0, 1): (2h + 1) / 2²⁴ has 24 significant bits, so both float steps are exact."""

# splitmix64's 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, signed.
_STEP = -0x61C8864680B583EB
_MIX_A = -0x40A7B892E31B1A47
_MIX_B = -0x6B2FB644ECCEEE15
# 0x9E3779B1, 0x7FEB352D, 0x846CA68B, 0xC2B2AE35, signed.
TOKEN_STRIDE = -0x61C8864F
MUL_A = 0x7FEB352D
MUL_B = -0x7B935975
MUL_C = -0x3D4D51CB

# A block of rows stays in the cache of one core between the passes; a GPU wants few launches instead.
_BLOCK_ELEMENTS_CPU = 1 << 18
_BLOCK_ELEMENTS_GPU = 1 << 26


def gumbel_noise(
    seeds_R: Tensor, positions_R: Tensor, vocab_size: int, *, device: torch.device | str | None = None
) -> Tensor:
    """g[r, v] = −log(−log u) in fp32, with u = (h(seed r, position r, v) + ½) / 2²³."""
    device = torch.device(device) if device is not None else seeds_R.device
    low_R1, high_R1 = row_keys(seeds_R.to(device), positions_R.to(device))
    noise_RV = torch.empty(seeds_R.shape[0], vocab_size, dtype=torch.float32, device=device)
    for rows in row_blocks(seeds_R.shape[0], vocab_size, device):
        fill_noise(noise_RV[rows], low_R1[rows], high_R1[rows])
    return noise_RV


def hash_bits(seeds_R: Tensor, positions_R: Tensor, vocab_size: int) -> Tensor:
    """h as int32 [R, V], on the device of the seeds."""
    low_R1, high_R1 = row_keys(seeds_R, positions_R)
    scratch_RV = torch.empty(seeds_R.shape[0], vocab_size, dtype=torch.int32, device=seeds_R.device)
    return _centred_bits(low_R1, high_R1, scratch_RV).add_(1 << (NOISE_BITS - 1))


def hash_bits_np(seeds: NDArray[np.uint64], positions: ArrayLike, token_ids: ArrayLike) -> NDArray[np.uint32]:
    """h for broadcastable arrays of unsigned seeds, output positions and token ids; scalars too."""
    step, mix_a, mix_b = (np.int64(value) for value in (_STEP, _MIX_A, _MIX_B))
    mul_token, mul_a, mul_b, mul_c = (np.int32(value) for value in (TOKEN_STRIDE, MUL_A, MUL_B, MUL_C))
    with np.errstate(over="ignore"):
        key = np.asarray(seeds, dtype=np.uint64).view(np.int64) + (np.asarray(positions, dtype=np.int64) + 1) * step
        key = (key ^ (key >> 30)) * mix_a
        key = (key ^ (key >> 27)) * mix_b
        key = key ^ (key >> 31)
        state = np.asarray(token_ids, dtype=np.int32) * mul_token + key.astype(np.int32)
        state = (state ^ (state >> 16)) * mul_a
        state = ((state ^ (state >> 15)) + (key >> 32).astype(np.int32)) * mul_b
        state = (state ^ (state >> 16)) * mul_c
    return np.asarray((state >> (32 - NOISE_BITS)) + (1 << (NOISE_BITS - 1)), dtype=np.uint32)


def row_keys(seeds_R: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
    """The low and the high half of mix64(seed + (position + 1)·step), as int32 columns."""
    key_R = seeds_R.to(torch.int64) + (positions_R.to(torch.int64) + 1) * _STEP
    key_R = (key_R ^ (key_R >> 30)) * _MIX_A
    key_R = (key_R ^ (key_R >> 27)) * _MIX_B
    key_R ^= key_R >> 31
    return key_R.to(torch.int32).unsqueeze(-1), (key_R >> 32).to(torch.int32).unsqueeze(-1)


def fill_noise(noise_RV: Tensor, low_R1: Tensor, high_R1: Tensor) -> None:
    bits_RV = _centred_bits(low_R1, high_R1, noise_RV.view(torch.int32))
    noise_RV.copy_(bits_RV).mul_(UNIFORM_SCALE).add_(UNIFORM_SHIFT)
    noise_RV.log_().neg_().log_().neg_()


def _centred_bits(low_R1: Tensor, high_R1: Tensor, scratch_RV: Tensor) -> Tensor:
    """h − 2²²: what a signed shift leaves of the state's upper 23 bits."""
    state_RV = _token_stride(scratch_RV.shape[1], scratch_RV.device) + low_R1
    state_RV ^= torch.bitwise_right_shift(state_RV, 16, out=scratch_RV)
    state_RV *= MUL_A
    state_RV ^= torch.bitwise_right_shift(state_RV, 15, out=scratch_RV)
    state_RV += high_R1
    state_RV *= MUL_B
    state_RV ^= torch.bitwise_right_shift(state_RV, 16, out=scratch_RV)
    state_RV *= MUL_C
    state_RV >>= 32 - NOISE_BITS
    return state_RV


@lru_cache(maxsize=8)
def _token_stride(vocab_size: int, device: torch.device) -> Tensor:
    return torch.arange(vocab_size, dtype=torch.int32, device=device) * TOKEN_STRIDE


def row_blocks(row_count: int, vocab_size: int, device: torch.device) -> Iterator[slice]:
    elements = _BLOCK_ELEMENTS_CPU if device.type == "cpu" else _BLOCK_ELEMENTS_GPU
    rows_per_block = max(1, elements // max(1, vocab_size))
    for start in range(0, row_count, rows_per_block):
        yield slice(start, start + rows_per_block)
