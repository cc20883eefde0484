"""Linear layers, adapted or not, with weights that oneDNN has reordered for this CPU: a sixth faster on one core, a third on two.

The reordered weights are a second copy, so only large fp32 matrices get one, and only where memory is plentiful. After the
weights were replaced in place, `reorder` must be called. Weights that are stored in fewer bits than the products are computed in
are widened for each product, into memory that all layers share. So are bf16 operands on a CPU whose bf16 products are slow: their
products are exact in float32 too, sums are float32 in either case, and the output is rounded to bf16 once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.policy.embedded.widening import COMPUTE, Widener
from shoal.policy.lora.layers import AdaptedLinear, add_low_rank
from shoal.policy.memory import available_bytes
from shoal.policy.products import has_onednn, is_faster_by_onednn, onednn_product, product

SMALLEST = 1 << 18
"""Elements of a matrix that is worth it: below, what a call costs beside its product eats the gain."""
MEMORY_SHARE = 0.25
"""Largest part of the free memory that copies may take."""
_ROWS = 32
"""For which oneDNN chooses the layout; any number of rows may use it."""
FEWEST_WIDENED = 8
"""Rows from which widening bf16 operands pays (`benchmarks/narrow_products.py`): three times at 64 with AVX2, not yet at four."""


class Linear:
    """inputs · weightᵀ + bias, and what adapters add to the parts of it."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, parts: Sequence[Any] = (), widener: Widener | None = None
    ) -> None:
        """`parts` are the layers whose outputs lie side by side in this one; those that are adapted say by what."""
        self.weight, self.bias = weight, bias
        self._widener = widener
        self._reordered: Tensor | None = None
        self._adapted: list[tuple[AdaptedLinear, slice]] = []
        start = 0
        for part in parts:
            if isinstance(part, AdaptedLinear):
                self._adapted.append((part, slice(start, start + part.out_features)))
            start += part.out_features

    @property
    def reordered_bytes(self) -> int:
        """Size of the copy; 0 if there is no use for one."""
        weight = self.weight
        large = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= SMALLEST
        return weight.nbytes if large else 0

    def reorder(self) -> None:
        self._reordered = None  # freed before the new one is made
        self._reordered = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _ROWS)

    def __call__(self, inputs_TI: Tensor) -> Tensor:
        products_TO = self._product(inputs_TI)
        for layer, part in self._adapted:
            if (factors := layer.factors) is not None:
                add_low_rank(products_TO[:, part], inputs_TI, factors)
        return products_TO

    def _product(self, inputs_TI: Tensor) -> Tensor:
        if self._reordered is not None:
            return onednn_product(inputs_TI, self._reordered, self.bias)
        operands, weight, bias = self._operands(inputs_TI)
        return product(operands, weight, bias).to(inputs_TI.dtype)

    def add_to(self, residual_TO: Tensor, inputs_TI: Tensor) -> Tensor:
        if self._reordered is not None or self._adapted:
            return self(inputs_TI).add_(residual_TO)
        operands, weight, bias = self._operands(inputs_TI)
        if is_faster_by_onednn(operands, weight):
            return onednn_product(operands, weight, bias).add_(residual_TO).to(residual_TO.dtype)
        added_TO = torch.addmm(residual_TO.to(operands.dtype), operands, weight.t())
        return (added_TO if bias is None else added_TO.add_(bias)).to(residual_TO.dtype)

    def _operands(self, inputs_TI: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs, weight and bias as the product takes them; the weight is valid until the next layer asks."""
        few = inputs_TI.dtype != COMPUTE and inputs_TI.shape[0] < FEWEST_WIDENED
        if self._widener is None or few:
            return inputs_TI, self.weight, self.bias
        bias = None if self.bias is None else self.bias.to(COMPUTE)
        return inputs_TI.to(COMPUTE), self._widener.widened(self.weight), bias


def choose_reordered(layers: Sequence[Linear]) -> list[Linear]:
    """Those of which a copy is worth its memory: all that are large enough, or none."""
    large = [layer for layer in layers if layer.reordered_bytes]
    if not (large and has_onednn()):
        return []
    needed = sum(layer.reordered_bytes for layer in large)
    return large if needed <= MEMORY_SHARE * available_bytes(torch.device("cpu")) else []


def has_slow_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch multiplies this type value by value: bf16 on a CPU without instructions that oneDNN needs for it."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return device.type == "cpu" and dtype == torch.bfloat16 and supported is not None and not supported()
