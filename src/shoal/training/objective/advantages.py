"""From rewards to advantages: one small pure function each.

Input: for each group the rewards of its samples, fp32. Output: tensors of the same shapes. A group whose rewards are all
equal gets zeros everywhere; a group of one sample has nothing to be compared with and gets zero (except batch-wide).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Advantage = Callable[[Sequence[Tensor]], list[Tensor]]

EPSILON = 1e-6


def grpo(groups: Sequence[Tensor]) -> list[Tensor]:
    """A = (r − mean) / (std + 1e-6), std with n − 1 (GRPO, arXiv 2402.03300; INTELLECT-2, arXiv 2505.07291)."""
    return [_centred(rewards) / (_std(rewards) + EPSILON) for rewards in groups]


def dr_grpo(groups: Sequence[Tensor]) -> list[Tensor]:
    """A = r − mean: no division by std, which overweights tasks solved nearly always or nearly never (arXiv 2503.20783)."""
    return [_centred(rewards) for rewards in groups]


def rloo(groups: Sequence[Tensor]) -> list[Tensor]:
    """A_i = r_i − mean of the others = n/(n − 1) · (r_i − mean) (leave-one-out baseline, arXiv 2402.14740)."""
    return [_centred(rewards) * (len(rewards) / max(1, len(rewards) - 1)) for rewards in groups]


def batch_normalised(groups: Sequence[Tensor]) -> list[Tensor]:
    """A = (r − group mean) / (std of that over the batch + 1e-6): one scale for all groups (REINFORCE++, arXiv 2501.03262)."""
    centred = [_centred(rewards) for rewards in groups]
    scale = _std(torch.cat(centred)) + EPSILON
    return [values / scale for values in centred]


def _centred(rewards: Tensor) -> Tensor:
    # Equal rewards must give exactly zero; the fp32 mean of n equal values can differ from them in the last place.
    return torch.where(rewards.max() == rewards.min(), torch.zeros_like(rewards), rewards - rewards.mean())


def _std(values: Tensor) -> Tensor:
    return values.std(correction=1) if len(values) > 1 else values.new_zeros(())


ADVANTAGES: dict[str, Advantage] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "batch_normalised": batch_normalised,
}
