"""The policy that the KL term measures from: a frozen copy of the first weights, or the base of an adapter, which needs no copy."""

from contextlib import nullcontext

import torch
from torch import Tensor

from shoal.policy.lora.layers import adapter_off
from shoal.training.model.model import PolicyModel
from shoal.training.packing.bins import Bin


class Reference:
    def __init__(self, policy: PolicyModel, copy: PolicyModel | None) -> None:
        """Without a copy it is `policy` with its adapter off."""
        self._policy, self.copy = policy, copy

    def __call__(self, batch: Bin) -> Tensor:
        with nullcontext() if self.copy is not None else adapter_off(self._policy.model):
            logprobs_N, _, _ = (self.copy or self._policy)(batch)
        return torch.as_tensor(logprobs_N)
