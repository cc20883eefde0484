"""Linear layers that are trained with the faster float32 products of this CPU, forwards and backwards (`policy/products.py`).

Only layers of a model that computes in float32 on a CPU are replaced, and only where torch's own products are slow. Parameters and
their names stay. The gradients are those of `nn.Linear`, apart from the order of sums.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.policy.products import has_slow_mkl, product


class TrainedLinear(nn.Linear):
    @classmethod
    def of(cls, linear: nn.Linear) -> "TrainedLinear":
        """The same parameters in another layer."""
        layer = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.dtype != torch.float32 or self.weight.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return F.linear(inputs, self.weight, self.bias)
        outputs: Tensor = _Product.apply(inputs, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return outputs


class _Product(torch.autograd.Function):
    """inputs · weightᵀ + bias. Transposed factors are views: oneDNN reads them as they are."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        context.save_for_backward(inputs, weight_OI)
        return product(inputs.flatten(0, -2), weight_OI, bias_O).view(*inputs.shape[:-1], weight_OI.shape[0])

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight_OI = context.saved_tensors
        gradient_NO, inputs_NI = gradient.flatten(0, -2), inputs.flatten(0, -2)
        needs_inputs, needs_weight, needs_bias = context.needs_input_grad
        return (
            product(gradient_NO, weight_OI.t()).view_as(inputs) if needs_inputs else None,
            product(gradient_NO.t(), inputs_NI.t()) if needs_weight else None,
            gradient_NO.sum(0) if needs_bias else None,
        )


def use_fast_products(model: Any, compute_dtype: torch.dtype) -> None:
    """Replaces linear layers where it pays; adapted ones and those of a subclass stay as they are."""
    if compute_dtype != torch.float32 or not has_slow_mkl():
        return
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head and module.weight.device.type == "cpu":
            model.set_submodule(name, TrainedLinear.of(module))
