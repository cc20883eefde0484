"""The adapter that a trainer trains: factors in float32 beside a base that is frozen in the type in which it is stored.

A new adapter has A from a seed and the layer's name, and B zero, so that version 0 computes what the base computes. Factors are the
same on any world size: each rank makes the whole and keeps its part.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.config import LoraConfig
from shoal.policy.lora.files import read_factors, trained_factors
from shoal.policy.lora.layers import adapt, widen_vectors
from shoal.policy.lora.targets import target_names
from shoal.training.model.dithering import own_part, uniform_noise


@dataclass(frozen=True)
class Adapter:
    lora: LoraConfig
    start: Path | None = None
    """A PEFT directory to go on from."""
    seed: int = 0


def freeze_and_adapt(model: Any, adapter: Adapter, residual_dtype: torch.dtype) -> None:
    """Before the model is sharded. What runs between the layers is in `residual_dtype`, whatever the base is stored in."""
    adapt(model, target_names(model, adapter.lora), adapter.lora, trained=True)
    widen_vectors(model)
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output.to(residual_dtype))


@torch.no_grad()
def set_factors(model: nn.Module, adapter: Adapter) -> None:
    """After the model is sharded."""
    live = trained_factors(model)
    if adapter.start is not None:
        given = read_factors(adapter.start, {name: (tensor.shape[0], tensor.shape[1]) for name, tensor in live.items()})
    for name, tensor in live.items():
        whole = given[name] if adapter.start is not None else _new(name, tensor, adapter.seed)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local.copy_(own_part(whole, tensor))


def _new(name: str, tensor: Tensor, seed: int) -> Tensor:
    """As PEFT makes them: A uniform within 1/√inputs, B zero."""
    if name.endswith("lora_B.weight"):
        return torch.zeros(tensor.shape)
    return uniform_noise(name, tuple(tensor.shape), seed) * (2 / math.sqrt(tensor.shape[1]))
