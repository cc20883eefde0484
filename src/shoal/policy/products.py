"""Float32 products of layers on this CPU: by MKL, or by oneDNN where that is faster.

torch multiplies float32 matrices with MKL, which uses half of the vector width of processors that are not Intel's. With AVX-512
oneDNN is twice as fast there (`benchmarks/layer_products.py`), but prepares itself again for each number of rows, which pays for
large products only. The choice follows from the processor and the shapes alone, so that the same work gives the same bits again.
"""

from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST = 1 << 25
"""Multiplications of a product that is worth the quarter of a millisecond that oneDNN needs for a new shape."""
CPU_FACTS = Path("/proc/cpuinfo")


def product(inputs_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """inputs · weightᵀ + bias."""
    if is_faster_by_onednn(inputs_NI, weight_OI):
        return onednn_product(inputs_NI, weight_OI, bias_O)
    return F.linear(inputs_NI, weight_OI, bias_O)


def onednn_product(inputs_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`weight_OI` may be in the layout that oneDNN has made for this CPU."""
    products_NO: Tensor = torch.ops.mkldnn._linear_pointwise(inputs_NI, weight_OI, bias_O, "none", [], "")
    return products_NO


def is_faster_by_onednn(inputs_NI: Tensor, weight_OI: Tensor) -> bool:
    return (
        has_slow_mkl()
        and inputs_NI.numel() * weight_OI.shape[0] >= SMALLEST
        and inputs_NI.dtype == weight_OI.dtype == torch.float32
        and inputs_NI.device.type == "cpu"
    )


def has_onednn() -> bool:
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


@lru_cache
def has_slow_mkl() -> bool:
    """Whether this is a processor with AVX-512 that MKL does not use it on."""
    has_wide_vectors = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has_onednn() and has_wide_vectors and torch.has_mkl and not _is_by_intel()


def _is_by_intel() -> bool:
    """Also where nothing is known: then torch's own choice stays."""
    try:
        facts = CPU_FACTS.read_text()
    except OSError:
        return True
    return "GenuineIntel" in facts or "vendor_id" not in facts
