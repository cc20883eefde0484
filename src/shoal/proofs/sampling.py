"""Sampling that anyone can repeat: token = argmax(logits / T + g), the Gumbel noise g a function of public integers.

In: a 64-bit sampling seed, the 0-based index of the output token, the logits over the true vocabulary. Out: the token
and its log-probability, or, for a claimed token, the margin by which it lost. The 23 hash bits behind g are identical
in torch and numpy, on every device and in any batch; only the two logarithms may differ in the last place.

Hash: one 64-bit mix per row gives two 32-bit keys; each token id then passes a 32-bit finaliser into which the keys
enter at two points, so rows share no streams. All shifts are arithmetic (torch has no unsigned ones; the steps stay
bijective). Seeds in torch are the two's complement of the unsigned ones.

Shapes: R draws (one output position of one sample each), N rows of logits (R, unless samples share them), V vocabulary entries.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

NOISE_BITS = 23

# splitmix64's 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, signed.
_STEP = -0x61C8864680B583EB
_MIX_A = -0x40A7B892E31B1A47
_MIX_B = -0x6B2FB644ECCEEE15
# 0x9E3779B1, 0x7FEB352D, 0x846CA68B, 0xC2B2AE35, signed.
_TOKEN = -0x61C8864F
_MUL_A = 0x7FEB352D
_MUL_B = -0x7B935975
_MUL_C = -0x3D4D51CB

# A block of rows stays in the cache of one core between the passes; a GPU wants few launches instead.
_BLOCK_ELEMENTS_CPU = 1 << 18
_BLOCK_ELEMENTS_GPU = 1 << 26


def gumbel_noise(
    seeds_R: Tensor, positions_R: Tensor, vocab_size: int, *, device: torch.device | str | None = None
) -> Tensor:
    """g[r, v] = −log(−log u) in fp32, with u = (h(seed r, position r, v) + ½) / 2²³."""
    device = torch.device(device) if device is not None else seeds_R.device
    low_R1, high_R1 = _row_keys(seeds_R.to(device), positions_R.to(device))
    noise_RV = torch.empty(seeds_R.shape[0], vocab_size, dtype=torch.float32, device=device)
    for rows in _row_blocks(seeds_R.shape[0], vocab_size, device):
        _fill_noise(noise_RV[rows], low_R1[rows], high_R1[rows])
    return noise_RV


def hash_bits(seeds_R: Tensor, positions_R: Tensor, vocab_size: int) -> Tensor:
    """h as int32 [R, V], on the device of the seeds."""
    low_R1, high_R1 = _row_keys(seeds_R, positions_R)
    scratch_RV = torch.empty(seeds_R.shape[0], vocab_size, dtype=torch.int32, device=seeds_R.device)
    return _centred_bits(low_R1, high_R1, scratch_RV).add_(1 << (NOISE_BITS - 1))


def hash_bits_np(seeds: NDArray[np.uint64], positions: ArrayLike, token_ids: ArrayLike) -> NDArray[np.uint32]:
    """h for broadcastable arrays of unsigned seeds, output positions and token ids; scalars too."""
    step, mix_a, mix_b = (np.int64(value) for value in (_STEP, _MIX_A, _MIX_B))
    mul_token, mul_a, mul_b, mul_c = (np.int32(value) for value in (_TOKEN, _MUL_A, _MUL_B, _MUL_C))
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


@torch.no_grad()
def choose_tokens(logits_RV: Tensor, seeds_R: Tensor, positions_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The winner of each row (ties: the lowest id) and its log_softmax(logits / T), without noise."""
    tokens_R = torch.empty(logits_RV.shape[0], dtype=torch.int64, device=logits_RV.device)
    logprobs_R = torch.empty(logits_RV.shape[0], dtype=torch.float32, device=logits_RV.device)
    for rows, scaled_bV, scores_bV in _perturbed_blocks(logits_RV, seeds_R, positions_R, temperature):
        tokens_R[rows] = scores_bV.argmax(dim=-1)
        logprobs_R[rows] = _logprobs(scaled_bV, tokens_R[rows])
    return tokens_R, logprobs_R


@torch.no_grad()
def token_margins(
    logits_NV: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    tokens_R: Tensor,
    temperature: float,
    *,
    rows_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """By how much each claimed token lost in logits / T + g (0 for the winner), and its log-probability.

    `rows_R` names the logits that each draw is from, as several samples may have come the same way; by default each has its own.
    A row that cannot be judged (a logit is not a number) has an infinite margin, never a passing one.
    """
    rows_R = torch.arange(logits_NV.shape[0], device=logits_NV.device) if rows_R is None else rows_R
    if logits_NV.device.type == "cpu":
        return _margins_on_cpu(logits_NV, rows_R, seeds_R, positions_R, tokens_R, temperature)
    margins_R = torch.empty(rows_R.shape[0], dtype=torch.float32, device=logits_NV.device)
    logprobs_R = torch.empty_like(margins_R)
    for part, scaled_bV, scores_bV in _perturbed_blocks(logits_NV, seeds_R, positions_R, temperature, rows_R):
        claimed_b1 = tokens_R[part].to(scores_bV.device, torch.int64).unsqueeze(-1)
        margins_R[part] = scores_bV.amax(dim=-1) - scores_bV.gather(-1, claimed_b1).squeeze(-1)
        logprobs_R[part] = _logprobs(scaled_bV, claimed_b1.squeeze(-1))
    return margins_R.nan_to_num_(nan=torch.inf, posinf=torch.inf), logprobs_R


def _margins_on_cpu(
    logits_NV: Tensor, rows_R: Tensor, seeds_R: Tensor, positions_R: Tensor, tokens_R: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """The same, with noise only for tokens that could win: a third of an audit would go into noise otherwise."""
    from shoal.proofs.contests import lost_margins

    _check_temperature(temperature)
    low_R1, high_R1 = _row_keys(seeds_R.cpu(), positions_R.cpu())
    rows_R, tokens_R = rows_R.to("cpu", torch.int64), tokens_R.to("cpu", torch.int64)
    scaled_NV = (logits_NV.to(torch.float32) / temperature).contiguous()
    margins_R = torch.empty(rows_R.shape[0], dtype=torch.float32)
    arrays = (scaled_NV, rows_R, low_R1.squeeze(-1), high_R1.squeeze(-1), tokens_R, margins_R)
    lost_margins(*(array.numpy() for array in arrays))
    logprobs_R = scaled_NV[rows_R, tokens_R] - scaled_NV.logsumexp(dim=-1)[rows_R]
    return margins_R.nan_to_num_(nan=torch.inf, posinf=torch.inf), logprobs_R


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


def _perturbed_blocks(
    logits_NV: Tensor, seeds_R: Tensor, positions_R: Tensor, temperature: float, rows_R: Tensor | None = None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (draws, logits / T, logits / T + g) block by block; `rows_R` as in `token_margins`."""
    _check_temperature(temperature)
    device = logits_NV.device
    low_R1, high_R1 = _row_keys(seeds_R.to(device), positions_R.to(device))
    for part in _row_blocks(seeds_R.shape[0], logits_NV.shape[1], device):
        logits_bV = logits_NV[part] if rows_R is None else logits_NV[rows_R[part]]
        scaled_bV = logits_bV.to(torch.float32) / temperature
        noise_bV = torch.empty_like(scaled_bV)
        _fill_noise(noise_bV, low_R1[part], high_R1[part])
        yield part, scaled_bV, noise_bV.add_(scaled_bV)


def _logprobs(scaled_RV: Tensor, tokens_R: Tensor) -> Tensor:
    return scaled_RV.gather(-1, tokens_R.unsqueeze(-1)).squeeze(-1) - scaled_RV.logsumexp(dim=-1)


def _row_keys(seeds_R: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
    """The low and the high half of mix64(seed + (position + 1)·step), as int32 columns."""
    key_R = seeds_R.to(torch.int64) + (positions_R.to(torch.int64) + 1) * _STEP
    key_R = (key_R ^ (key_R >> 30)) * _MIX_A
    key_R = (key_R ^ (key_R >> 27)) * _MIX_B
    key_R ^= key_R >> 31
    return key_R.to(torch.int32).unsqueeze(-1), (key_R >> 32).to(torch.int32).unsqueeze(-1)


def _fill_noise(noise_RV: Tensor, low_R1: Tensor, high_R1: Tensor) -> None:
    bits_RV = _centred_bits(low_R1, high_R1, noise_RV.view(torch.int32))
    # (2h + 1) / 2²⁴ has 24 significant bits, so both float steps before the logarithms are exact.
    noise_RV.copy_(bits_RV).mul_(2.0**-NOISE_BITS).add_(0.5 + 2.0 ** -(NOISE_BITS + 1))
    noise_RV.log_().neg_().log_().neg_()


def _centred_bits(low_R1: Tensor, high_R1: Tensor, scratch_RV: Tensor) -> Tensor:
    """h − 2²²: what an arithmetic shift leaves of the state's upper 23 bits."""
    state_RV = _token_stride(scratch_RV.shape[1], scratch_RV.device) + low_R1
    state_RV ^= torch.bitwise_right_shift(state_RV, 16, out=scratch_RV)
    state_RV *= _MUL_A
    state_RV ^= torch.bitwise_right_shift(state_RV, 15, out=scratch_RV)
    state_RV += high_R1
    state_RV *= _MUL_B
    state_RV ^= torch.bitwise_right_shift(state_RV, 16, out=scratch_RV)
    state_RV *= _MUL_C
    state_RV >>= 32 - NOISE_BITS
    return state_RV


@lru_cache(maxsize=8)
def _token_stride(vocab_size: int, device: torch.device) -> Tensor:
    return torch.arange(vocab_size, dtype=torch.int32, device=device) * _TOKEN


def _row_blocks(row_count: int, vocab_size: int, device: torch.device) -> Iterator[slice]:
    elements = _BLOCK_ELEMENTS_CPU if device.type == "cpu" else _BLOCK_ELEMENTS_GPU
    rows_per_block = max(1, elements // max(1, vocab_size))
    for start in range(0, row_count, rows_per_block):
        yield slice(start, start + rows_per_block)
