"""Exact float32 products: the process asks for them, and tries them out before any work depends on them.

Libraries and environment variables can reduce float32 products behind a program's back: TF32 on NVIDIA GPUs, bfloat16 in oneDNN
(AMX). Such work differs from honest float32 work, so audits would reject it and penalise its worker, or a validator would score
by it. A product with a permuted identity has one non-zero term per sum, so exact numerics return every bit of the other factor.
A mode may change at any time, by a verifier's library for instance: engines ask again before every pass, and try again with every
version that they read.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.errors import ConfigError
from shoal.policy.products import has_onednn, onednn_product

SIZE = 512
ROWS = (1, 7, 256)
"""Libraries choose other kernels for few rows than for many."""

Product = Callable[[Tensor, Tensor], Tensor]
"""inputs · weightᵀ."""


class InexactProductsError(ConfigError):
    """Float32 products of this machine are not float32."""

    code = "inexact_products"


def _batched(inputs: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(inputs[None], weight.t()[None])[0]


def _by_onednn(inputs: Tensor, weight: Tensor) -> Tensor:
    is_possible = weight.device.type == "cpu" and has_onednn()
    return onednn_product(inputs, weight) if is_possible else F.linear(inputs, weight)


def _reordered(inputs: Tensor, weight: Tensor) -> Tensor:
    """By oneDNN with weights in its own layout; plain where this build or device has no such product."""
    if weight.device.type != "cpu" or not has_onednn():
        return F.linear(inputs, weight)
    return onednn_product(inputs, torch.ops.mkldnn._reorder_linear_weight(weight, len(inputs)))


PRODUCTS: dict[str, Product] = {
    "linear": F.linear,
    "oneDNN": _by_onednn,
    "reordered": _reordered,
    "batched": _batched,
}


def use_exact_products(device: torch.device) -> None:
    """Asks for exact float32 products, and refuses a device that does not give them all the same."""
    pin_exact_products()
    require_exact(device, PRODUCTS)


def pin_exact_products() -> None:
    """Takes back every mode that this process may have set; about a microsecond."""
    torch.set_float32_matmul_precision("highest")


@torch.inference_mode()
def require_exact(device: torch.device, products: Mapping[str, Product]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.eye(SIZE)[torch.randperm(SIZE, generator=generator)]
    chosen = weight.argmax(dim=1)
    for name, product in products.items():
        for rows in ROWS:
            inputs = torch.randn(rows, SIZE, generator=generator)
            result = product(inputs.to(device), weight.to(device)).cpu()
            if not torch.equal(result, inputs[:, chosen]):
                raise InexactProductsError(
                    f"Float32 products on this machine's {device.type} are reduced ({name} product of {rows} rows).",
                    hint="Unset NVIDIA_TF32_OVERRIDE and ONEDNN_DEFAULT_FPMATH_MODE, or work in an admitted coarser class.",
                )
