"""Weights at rest in bf16, products in float32: the memory of the one, the results of the other, bit for bit.

Published weights are bf16, so widening them loses nothing. Vectors and buffers are float32 anyway: they are small. A matrix is
widened when its layer computes, and the wide copy is gone when the next one does. `FusedBackbone` widens into one piece of memory;
the modules of other architectures get hooks that do the same for whatever parameters they have.
"""

from typing import Any

import torch
from torch import Tensor, nn

from shoal.policy.lora.layers import AdaptedLinear

COMPUTE = torch.float32


class Widener:
    """One piece of memory for the matrix that is being used, as large as the largest one so far."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=COMPUTE)

    def widened(self, weight: Tensor) -> Tensor:
        """A copy that is valid until the next call."""
        if self._memory.numel() < weight.numel() or self._memory.device != weight.device:
            self._memory = torch.empty(0, dtype=COMPUTE)  # freed before the new one is made
            self._memory = torch.empty(weight.numel(), dtype=COMPUTE, device=weight.device)
        return self._memory[: weight.numel()].view(weight.shape).copy_(weight)


def compute_wide(model: nn.Module) -> None:
    """Makes a model whose matrices are stored in bf16 compute in float32, one module's parameters at a time."""
    for module in model.modules():
        if type(module) is nn.Embedding:  # a subclass may compute with its table: Gemma scales it
            module.register_forward_hook(_widen_output)
        elif not isinstance(module, AdaptedLinear) and any(map(_is_narrow, module.parameters(recurse=False))):
            module.register_forward_pre_hook(_widen_parameters)
            module.register_forward_hook(_restore_parameters, always_call=True)


def _is_narrow(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and parameter.dtype != COMPUTE


def _widen_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A table is read by row: widening all of it would cost more than all layers."""
    return output.to(COMPUTE)


def _widen_parameters(module: Any, inputs: Any) -> None:
    module.stored_parameters = [(each, each.data) for each in module.parameters(recurse=False) if _is_narrow(each)]
    for parameter, stored in module.stored_parameters:
        parameter.data = stored.to(COMPUTE)


def _restore_parameters(module: Any, inputs: Any, output: Any) -> None:
    for parameter, stored in getattr(module, "stored_parameters", ()):
        parameter.data = stored
    module.stored_parameters = []
