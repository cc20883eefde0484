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
from shoal.policy.lora.checks import check_start
from shoal.policy.lora.files import read_factors, trained_factors
from shoal.policy.lora.layers import adapt, widen_vectors
from shoal.policy.lora.targets import target_names
from shoal.training.model.dithering import first_row, noise_of_rows


@dataclass(frozen=True)
class Adapter:
    lora: LoraConfig
    start: Path | None = None
    """A PEFT directory to go on from."""
    seed: int = 0


def freeze_and_adapt(model: Any, adapter: Adapter, base: Path) -> None:
    """Before the model is sharded. What flows between the layers is fp32, whatever the base is stored in."""
    if adapter.start is not None:
        check_start(adapter.start, adapter.lora, base)
    adapt(model, target_names(model, adapter.lora), adapter.lora, trained=True)
    widen_vectors(model)
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output.float())


@torch.no_grad()
def set_factors(model: nn.Module, adapter: Adapter) -> None:
    """After the model is sharded."""
    live = trained_factors(model)
    if adapter.start is not None:
        given = read_factors(adapter.start, {name: (tensor.shape[0], tensor.shape[1]) for name, tensor in live.items()})
    for name, tensor in live.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        first = first_row(tensor)
        if adapter.start is not None:
            local.copy_(given[name][first : first + len(local)])
        else:
            _begin(name, local, first, adapter.seed)


def _begin(name: str, local: Tensor, first: int, seed: int) -> None:
    """As PEFT does: A uniform within 1/√inputs, B zero."""
    if name.endswith("lora_B.weight"):
        local.zero_()
    elif len(local):  # a factor with fewer rows than ranks leaves the last ranks with none
        local.copy_(noise_of_rows(f"{seed}/{name}", local.shape, first) * (2 / math.sqrt(local.shape[1])))
