"""How a linear layer is adapted: y = Wx + (α/r)·B(Ax), in that order, never merged. The only place that knows.

Every linear layer of an adapted model is an `AdaptedLinear`: W is frozen in the type in which the base is stored and widened for
the product, one layer at a time, in the backward pass again. Its factors are parameters where they are trained, and a pointer to
those of a resident version in an engine. Without factors, or inside `adapter_off`, the layer is that of the base.

Shapes: T tokens, I inputs, O outputs, R rank.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config import LoraConfig


class Factors(NamedTuple):
    down_RI: Tensor
    """A, in PEFT's words."""
    up_OR: Tensor
    """B."""
    scale: float


def add_low_rank(products_TO: Tensor, inputs_TI: Tensor, factors: Factors) -> None:
    """products += scale·B(A·inputs), in the type of the products."""
    low_TR = F.linear(inputs_TI, factors.down_RI).to(products_TO.dtype)
    products_TO.addmm_(low_TR, factors.up_OR.to(products_TO.dtype).t(), alpha=factors.scale)


class AdaptedLinear(nn.Module):
    """Takes the place of a linear layer, under the same names of weight and bias."""

    def __init__(self, linear: nn.Linear, *, rank: int = 0, scale: float = 1.0) -> None:
        """With a `rank` it has factors of its own, to be trained."""
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale, self.is_on = scale, True
        self.loaded: Factors | None = None
        """Of the version that an engine serves."""
        self.lora_A = self.lora_B = None
        if rank:
            place: dict[str, Any] = {"bias": False, "dtype": torch.float32, "device": linear.weight.device}
            self.lora_A = nn.Linear(linear.in_features, rank, **place)
            self.lora_B = nn.Linear(rank, linear.out_features, **place)

    @property
    def factors(self) -> Factors | None:
        if not self.is_on:
            return None
        if self.lora_A is None or self.lora_B is None:
            return self.loaded
        return Factors(self.lora_A.weight, self.lora_B.weight, self.scale)

    def forward(self, inputs: Tensor) -> Tensor:
        flat_TI = inputs.flatten(0, -2)
        products_TO = _frozen_product(flat_TI, self.weight, self.bias)
        if (factors := self.factors) is not None:
            add_low_rank(products_TO, flat_TI, factors)
        return products_TO.view(*inputs.shape[:-1], -1)


def adapt(model: Any, names: Sequence[str], lora: LoraConfig, *, trained: bool) -> None:
    """Freeze a model and make every linear layer an adapted one; `names` get factors of their own where they are `trained`."""
    model.requires_grad_(False)
    chosen = set(names) if trained else set()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            rank = lora.rank if name in chosen else 0
            model.set_submodule(name, AdaptedLinear(module, rank=rank, scale=lora.scale))


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    """Every adapted layer by its path, the LM head included."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}


def widen_vectors(model: nn.Module) -> None:
    """Norms and biases become float32, which loses nothing: products of mixed types are defined for matrices only."""
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.data = parameter.data.float()


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The base, for as long as the block lasts."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


def _frozen_product(inputs_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    if weight_OI.dtype == inputs_TI.dtype or torch.is_autocast_enabled(inputs_TI.device.type):
        return F.linear(inputs_TI, weight_OI, bias_O)
    products_TO: Tensor = _Widened.apply(inputs_TI, weight_OI, bias_O)  # type: ignore[no-untyped-call]
    return products_TO


class _Widened(torch.autograd.Function):
    """Saves the stored weight, not its widened copy: all layers' copies together would be as large as a whole model."""

    @staticmethod
    def forward(ctx: Any, inputs_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight_OI)
        return F.linear(inputs_TI, weight_OI.to(inputs_TI.dtype), bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (weight_OI,) = ctx.saved_tensors
        return gradients[0] @ weight_OI.to(gradients[0].dtype), None, None
