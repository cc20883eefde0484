"""Weights that correct for the lag between the policy that generated and the one that trains.

r = π_old / π_behaviour per token, where a validator computed π_behaviour; elsewhere the trainer uses weight 1 without asking
these functions. Inputs: log r of N tokens, `row_N` (which completion), number of completions, the cap c. No gradients.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Correction = Callable[[Tensor, Tensor, int, float], Tensor]


def none(log_ratio_N: Tensor, row_N: Tensor, rows: int, cap: float) -> Tensor:
    """w = 1: the recomputed policy replaces the one that sampled (arXiv 2505.07291)."""
    return torch.ones_like(log_ratio_N)


def truncated_token(log_ratio_N: Tensor, row_N: Tensor, rows: int, cap: float) -> Tensor:
    """w = min(r, c): truncated importance sampling per token (IMPALA, arXiv 1802.01561)."""
    return log_ratio_N.exp().clamp(max=cap)


def truncated_sequence(log_ratio_N: Tensor, row_N: Tensor, rows: int, cap: float) -> Tensor:
    """w = min(∏ r over the completion, c): unbiased up to the cap, higher variance than per token."""
    totals = log_ratio_N.new_zeros(rows).index_add(0, row_N, log_ratio_N)
    return totals.exp().clamp(max=cap)[row_N]


def masked(log_ratio_N: Tensor, row_N: Tensor, rows: int, cap: float) -> Tensor:
    """w = 1 if 1/c ≤ r ≤ c else 0: tokens on which the two policies disagree strongly are not trained."""
    ratio_N = log_ratio_N.exp()
    return ((ratio_N >= 1 / cap) & (ratio_N <= cap)).to(log_ratio_N.dtype)


def decoupled(log_ratio_N: Tensor, row_N: Tensor, rows: int, cap: float) -> Tensor:
    """w = r if r ≤ c else 0: clip around the recomputed policy, weight by recomputed/behaviour (AReaL, arXiv 2505.24298)."""
    ratio_N = log_ratio_N.exp()
    return torch.where(ratio_N <= cap, ratio_N, 0.0)


CORRECTIONS: dict[str, Correction] = {
    "none": none,
    "truncated_token": truncated_token,
    "truncated_sequence": truncated_sequence,
    "masked": masked,
    "decoupled": decoupled,
}
