"""Policy losses, one small pure function each, per trained token; the trainer sums them and divides once, globally.

N trained tokens of whole completions; ρ = exp(log π − log π_old), A the advantage of the token's completion. Every loss also
says which tokens it clipped, that is, which have no gradient; the trainer only logs that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.config import TrainingConfig


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of one bin, completion after completion; only `logprobs_N` has a gradient."""

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    row_N: Tensor
    """Which completion a token belongs to: 0 … rows − 1."""
    rows: int

    @property
    def ratios_N(self) -> Tensor:
        return torch.exp(self.logprobs_N - self.old_logprobs_N)


class TokenLoss(NamedTuple):
    loss_N: Tensor
    clipped_N: Tensor


Loss = Callable[[TokenBatch, TrainingConfig], TokenLoss]


def two_sided_grpo(batch: TokenBatch, config: TrainingConfig) -> TokenLoss:
    """L = −min( min(ρ, δ)·A , clip(ρ, 1−ε, 1+ε)·A )   (INTELLECT-2, arXiv 2505.07291).

    With A < 0 the usual clip leaves ρ unbounded; δ bounds it.
    """
    return _clipped_surrogate(batch, config, delta=config.clip_delta)


def dapo(batch: TokenBatch, config: TrainingConfig) -> TokenLoss:
    """L = −min( ρ·A , clip(ρ, 1−ε_low, 1+ε_high)·A ), ε 0.2 / 0.28 unless the run file names others: unlikely tokens can rise
    (arXiv 2503.14476)."""
    return _clipped_surrogate(batch, config, delta=float("inf"))


def cispo(batch: TokenBatch, config: TrainingConfig) -> TokenLoss:
    """L = −sg(min(ρ, δ))·A·log π   (MiniMax-M1, arXiv 2506.13585; cap 5 in arXiv 2510.13786).

    The weight is capped, and no token loses its gradient.
    """
    weights_N = batch.ratios_N.detach().clamp(max=config.clip_delta)
    return TokenLoss(-weights_N * batch.advantages_N * batch.logprobs_N, torch.zeros_like(weights_N, dtype=torch.bool))


def gspo(batch: TokenBatch, config: TrainingConfig) -> TokenLoss:
    """L = −min( s·A , clip(s, 1−ε_low, 1+ε_high)·A ), s = exp(mean over the completion of log ρ)   (arXiv 2507.18071).

    ε 3e-4 / 4e-4 unless the run file names others. Every token carries the loss of its completion; with `loss_weighting =
    "sequence"`, the default of this loss, the sum is the paper's mean over completions.
    """
    mean_N = row_mean(batch.logprobs_N - batch.old_logprobs_N, batch.row_N, batch.rows)[batch.row_N]
    return _surrogate(torch.exp(mean_N), batch.advantages_N, config, delta=float("inf"))


def k3_divergence(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """KL₃(π‖π_ref) = e^d − d − 1, d = log π_ref − log π: unbiased, never negative (Schulman 2020). Has a gradient in log π."""
    difference_N = reference_N - logprobs_N
    return torch.exp(difference_N) - difference_N - 1


def penalised(advantages_N: Tensor, old_N: Tensor, reference_N: Tensor, beta: float) -> Tensor:
    """A − β·log(π_old/π_ref): the divergence as a cost of each token (PPO), without a gradient of its own."""
    return advantages_N - beta * (old_N - reference_N)


def row_mean(values_N: Tensor, row_N: Tensor, rows: int) -> Tensor:
    """Mean over the tokens of each completion."""
    totals = values_N.new_zeros(rows).index_add(0, row_N, values_N)
    counts = values_N.new_zeros(rows).index_add(0, row_N, torch.ones_like(values_N))
    return totals / counts


def _clipped_surrogate(batch: TokenBatch, config: TrainingConfig, *, delta: float) -> TokenLoss:
    return _surrogate(batch.ratios_N, batch.advantages_N, config, delta=delta)


def _surrogate(ratios_N: Tensor, advantages_N: Tensor, config: TrainingConfig, *, delta: float) -> TokenLoss:
    low, high = 1 - config.clip_epsilon, 1 + (config.clip_epsilon_high or config.clip_epsilon)
    loss_N = -torch.minimum(ratios_N.clamp(max=delta) * advantages_N, ratios_N.clamp(low, high) * advantages_N)
    with torch.no_grad():
        raised = (advantages_N > 0) & (ratios_N > high)
        lowered = (advantages_N < 0) & ((ratios_N < low) | (ratios_N > delta))
    return TokenLoss(loss_N, raised | lowered)


LOSSES: dict[str, Loss] = {"two_sided_grpo": two_sided_grpo, "dapo": dapo, "cispo": cispo, "gspo": gspo}
