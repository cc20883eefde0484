"""Matrix products with weights that oneDNN has laid out for this CPU: a sixth faster on one core, a third on two.

The laid-out weights are a second copy, so only large fp32 matrices get one, and only where memory is plentiful. Whoever replaces
the weights in place calls `pack` afterwards.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.policy.memory import available_bytes

SMALLEST = 1 << 18
"""Elements of a matrix that is worth it: below, what a call costs beside its product eats the gain."""
MEMORY_SHARE = 0.25
"""Largest part of the free memory that copies may take."""
_ROWS = 32
"""For which oneDNN chooses the layout; any number of rows may use it."""


class Product:
    """inputs · weightᵀ + bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self._packed: Tensor | None = None

    @property
    def packable_bytes(self) -> int:
        """Size of the copy; 0 if there is no use for one."""
        weight = self.weight
        large = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= SMALLEST
        return weight.nbytes if large else 0

    def pack(self) -> None:
        self._packed = None  # freed before the new one is made
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _ROWS)

    def __call__(self, inputs_TI: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(inputs_TI, self.weight, self.bias)
        products_TO: Tensor = torch.ops.mkldnn._linear_pointwise(inputs_TI, self._packed, self.bias, "none", [], "")
        return products_TO

    def add_to(self, residual_TO: Tensor, inputs_TI: Tensor) -> Tensor:
        if self._packed is not None:
            return self(inputs_TI).add_(residual_TO)
        added_TO = torch.addmm(residual_TO, inputs_TI, self.weight.t())
        return added_TO if self.bias is None else added_TO.add_(self.bias)


def choose_packed(products: Sequence[Product]) -> list[Product]:
    """Those of which a copy is worth its memory: all that are large enough, or none."""
    large = [product for product in products if product.packable_bytes]
    if not (large and hasattr(torch.ops.mkldnn, "_linear_pointwise")):  # a build without oneDNN
        return []
    needed = sum(product.packable_bytes for product in large)
    return large if needed <= MEMORY_SHARE * available_bytes(torch.device("cpu")) else []
