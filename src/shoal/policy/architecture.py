"""What engine and trainer must agree on about an architecture: its logits, its mask, its decoder blocks, its shapes.

Shapes: S positions, V vocabulary; any leading dimensions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import first_line
from shoal.policy.directory import ModelError

_MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_MULTIPLY_BY_LOGITS_SCALING = {"hyperclovax"}
"""`logits_scaling` divides everywhere else."""


@dataclass(frozen=True)
class HeadLogits:
    """From the products of states and LM head to logits: cap·tanh(scale·products / cap), or scale·products without a cap.

    Transformers' models scale before they cap.
    """

    scale: float = 1.0
    cap: float = 0.0

    @classmethod
    def of(cls, config: Any) -> "HeadLogits":
        """`config` is that of the text model."""
        scale = 1.0
        for name in _MULTIPLIERS:
            scale *= float(getattr(config, name, None) or 1.0)
        scaling = float(getattr(config, "logits_scaling", None) or 1.0)
        multiplies = getattr(config, "model_type", "") in _MULTIPLY_BY_LOGITS_SCALING
        scale = scale * scaling if multiplies else scale / scaling
        return cls(scale, float(getattr(config, "final_logit_softcapping", None) or 0.0))

    def __call__(self, products: Tensor) -> Tensor:
        logits = products if self.scale == 1.0 else products * self.scale
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits

    def backward(self, grad: Tensor, logits: Tensor, factor: float) -> Tensor:
        """The gradient of the products, given that of the logits, which it overwrites; `logits` are `factor` times too large."""
        if self.cap:
            grad *= 1 - (logits / (factor * self.cap)) ** 2
        return grad if self.scale == 1.0 else grad.mul_(self.scale)


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """True where query i may see key j: i − window < j ≤ i, as [S, S]."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def decoder_blocks(model: Any) -> list[nn.Module]:
    """The repeated layers, as the model names them; of nested ones the outermost."""
    names = set(model._no_split_modules or ())
    return list(_outermost(model, names, listed=True)) or list(_outermost(model, names, listed=False))


def _outermost(module: nn.Module, names: set[str], *, listed: bool) -> Iterator[nn.Module]:
    """`listed` leaves out what is not an item of a list of layers: embeddings and mixers are named among them, too."""
    for child in module.children():
        if type(child).__name__ in names and (isinstance(module, nn.ModuleList) or not listed):
            yield child
        else:
            yield from _outermost(child, names, listed=listed)


def meta_model(config: Any) -> nn.Module:
    """The causal language model that a Transformers config describes, without memory: names and shapes only."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        where = f"{config.name_or_path}/config.json" if config.name_or_path else "The config"
        raise ModelError(f"{where} describes no causal language model: {first_line(error)}.") from error
    return model
