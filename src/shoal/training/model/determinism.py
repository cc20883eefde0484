"""Steps that repeat bit for bit: deterministic kernels where there are some, and a fingerprint that tells whether two gradients are
the same in every bit.

A trainer that died repeats the steps since its last checkpoint, so equal inputs should give equal bits. On a GPU nothing but a test
says whether they do.
"""

import os
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

CHUNK = 1 << 22


def use_deterministic_kernels() -> None:
    """Before the first use of a GPU. Operations that have no deterministic kernel warn and run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling costs time, and nothing here reads memory that was not set.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> list[int]:
    """Two sums over the bits of each tensor, of fp32 or narrower; integers, so their order does not matter. Local parts only."""
    found: list[int] = []
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        flat = local.float().flatten()
        for start in range(0, len(flat), CHUNK):
            bits = flat[start : start + CHUNK].view(torch.int32).to(torch.int64)
            places = torch.arange(1, len(bits) + 1, device=bits.device)
            found += torch.stack([bits.sum(), (bits * places).sum()]).tolist()
    return found
