"""Sampling that anyone can repeat: token = argmax(logits / T + g), the Gumbel noise g a function of public integers.

In: a 64-bit sampling seed, the 0-based index of the output token, the logits over the true vocabulary. Out: the token
and its log-probability, or, for a claimed token, its margin (by how much its score lies below the best one) and how close the
winner's rivals were. `noise` defines g.

Shapes: R samples (one output position of one completion each), N rows of logits (R, unless samples share them), V vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.proofs.noise import fill_noise, row_blocks, row_keys

RIVALS = 2
"""Of the winner of a draw, the closest ones."""


@torch.no_grad()
def choose_tokens(
    logits_NV: Tensor, seeds_R: Tensor, positions_R: Tensor, temperature: float, *, rows_R: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The winner of each sample (ties: the lowest id) and its log_softmax(logits / T), without noise.

    `rows_R` names the row of logits of each sample, because samples may share one; by default each has its own.
    """
    tokens_R = torch.empty(seeds_R.shape[0], dtype=torch.int64, device=logits_NV.device)
    logprobs_R = torch.empty(seeds_R.shape[0], dtype=torch.float32, device=logits_NV.device)
    for rows, scaled_bV, scores_bV in _perturbed_blocks(logits_NV, seeds_R, positions_R, temperature, rows_R):
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
) -> tuple[Tensor, Tensor, Tensor]:
    """best score − claimed score of each token, score = logits / T + g (0 for the winner), its log-probability, and the rivals.

    Of the winner's two closest rivals [R, 4] holds how far their scores lie below the winner's, then how far their logits / T do.
    `rows_R` as in `choose_tokens`.
    A row that cannot be scored (a logit is not a number) has an infinite margin, never a passing one.
    """
    rows_R = torch.arange(logits_NV.shape[0], device=logits_NV.device) if rows_R is None else rows_R
    if logits_NV.device.type == "cpu":
        return _margins_on_cpu(logits_NV, rows_R, seeds_R, positions_R, tokens_R, temperature)
    margins_R = torch.empty(rows_R.shape[0], dtype=torch.float32, device=logits_NV.device)
    logprobs_R = torch.empty_like(margins_R)
    rivals_R4 = torch.empty(rows_R.shape[0], 2 * RIVALS, dtype=torch.float32, device=logits_NV.device)
    for part, scaled_bV, scores_bV in _perturbed_blocks(logits_NV, seeds_R, positions_R, temperature, rows_R):
        claimed_b1 = tokens_R[part].to(scores_bV.device, torch.int64).unsqueeze(-1)
        margins_R[part] = scores_bV.amax(dim=-1) - scores_bV.gather(-1, claimed_b1).squeeze(-1)
        logprobs_R[part] = _logprobs(scaled_bV, claimed_b1.squeeze(-1))
        rivals_R4[part] = _rivals(scaled_bV, scores_bV)
    return margins_R.nan_to_num_(nan=torch.inf, posinf=torch.inf), logprobs_R, _known_rivals(rivals_R4)


def _margins_on_cpu(
    logits_NV: Tensor, rows_R: Tensor, seeds_R: Tensor, positions_R: Tensor, tokens_R: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, with noise only for tokens that could win: a third of an audit would go into noise otherwise."""
    from shoal.proofs.margins import fill_margins

    _check_temperature(temperature)
    low_R1, high_R1 = row_keys(seeds_R.cpu(), positions_R.cpu())
    rows_R, tokens_R = rows_R.to("cpu", torch.int64), tokens_R.to("cpu", torch.int64)
    scaled_NV = (logits_NV.to(torch.float32) / temperature).contiguous()
    margins_R = torch.empty(rows_R.shape[0], dtype=torch.float32)
    rivals_R4 = torch.empty(rows_R.shape[0], 2 * RIVALS, dtype=torch.float32)
    arrays = (scaled_NV, rows_R, low_R1.squeeze(-1), high_R1.squeeze(-1), tokens_R, margins_R, rivals_R4)
    fill_margins(*(array.numpy() for array in arrays))
    logprobs_R = scaled_NV[rows_R, tokens_R] - scaled_NV.logsumexp(dim=-1)[rows_R]
    return margins_R.nan_to_num_(nan=torch.inf, posinf=torch.inf), logprobs_R, _known_rivals(rivals_R4)


def _rivals(scaled_RV: Tensor, scores_RV: Tensor) -> Tensor:
    first = scores_RV.topk(min(1 + RIVALS, scores_RV.shape[1]), dim=-1)
    values = scaled_RV.gather(-1, first.indices)
    gaps = torch.full((scores_RV.shape[0], 2, RIVALS), torch.inf, device=scores_RV.device)
    gaps[:, 0, : first.values.shape[1] - 1] = first.values[:, :1] - first.values[:, 1:]
    gaps[:, 1, : first.values.shape[1] - 1] = values[:, :1] - values[:, 1:]
    return gaps.flatten(1)


def _known_rivals(rivals_R4: Tensor) -> Tensor:
    """A rival of which nothing is known, because there is none or a logit is no number, is infinitely far away."""
    return rivals_R4.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


def _perturbed_blocks(
    logits_NV: Tensor, seeds_R: Tensor, positions_R: Tensor, temperature: float, rows_R: Tensor | None = None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (samples, logits / T, logits / T + g) block by block; `rows_R` as in `choose_tokens`."""
    _check_temperature(temperature)
    device = logits_NV.device
    low_R1, high_R1 = row_keys(seeds_R.to(device), positions_R.to(device))
    for part in row_blocks(seeds_R.shape[0], logits_NV.shape[1], device):
        logits_bV = logits_NV[part] if rows_R is None else logits_NV[rows_R[part]]
        scaled_bV = logits_bV.to(torch.float32) / temperature
        noise_bV = torch.empty_like(scaled_bV)
        fill_noise(noise_bV, low_R1[part], high_R1[part])
        yield part, scaled_bV, noise_bV.add_(scaled_bV)


def _logprobs(scaled_RV: Tensor, tokens_R: Tensor) -> Tensor:
    return scaled_RV.gather(-1, tokens_R.unsqueeze(-1)).squeeze(-1) - scaled_RV.logsumexp(dim=-1)
