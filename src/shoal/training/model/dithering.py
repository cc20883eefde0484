"""Dithered initialisation of fp32 master weights, so that published bf16 weights follow small updates.

All fp32 numbers that round to one bf16 number are its rounding interval. A checkpoint in bf16 puts every master weight into the
middle of its interval, and steps of 1e-6 to 1e-5 need tens of updates to leave it: until then workers do not see what the trainer
has learnt. Dithered master weights leave their intervals one by one, in proportion to the step: published weights follow in the
mean from the first update on, while version 0 stays the same bit for bit.
"""

from collections.abc import Iterable

import torch
from blake3 import blake3
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

BLOCK_ELEMENTS = 1 << 16
"""Noise that is drawn from one seed; rows are never cut."""


@torch.no_grad()
def dither_masters(tensors: Iterable[tuple[str, Tensor]], seed: int) -> None:
    """Move each weight that is exactly a bf16 number to a uniform place of its rounding interval, the same on any world size."""
    for name, tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.dtype == torch.float32 and local.numel():
            dither(local, noise_of_rows(f"{seed}/{name}", local.shape, first_row(tensor)))


@torch.no_grad()
def dither(weights: Tensor, noise: Tensor) -> None:
    """`noise` is uniform in −½ … ½, in units of the distance to the next number."""
    rounded = weights.to(torch.bfloat16)
    magnitude = rounded.abs()
    unit = (magnitude.view(torch.int16) + 1).view(torch.bfloat16).float() - magnitude.float()
    moved = rounded.float() + noise.to(weights.device) * unit
    # Intervals at powers of two are narrower on one side, zero has a sign, and a weight that is no bf16 number is dithered already.
    free = (moved.to(torch.bfloat16) == rounded) & (weights == rounded.float()) & (rounded != 0)
    weights.copy_(torch.where(free, moved, weights))


def noise_of_rows(name: str, shape: torch.Size, first: int = 0) -> Tensor:
    """Noise of the rows of a tensor from `first` on, in the shape of these rows. Rows are drawn in blocks, each from a seed of its
    own, so that a rank draws no more than a block beyond its rows."""
    if not shape:
        return _block(name, 0, 1).view(())
    width = shape[1:].numel()
    rows = max(1, BLOCK_ELEMENTS // max(1, width))
    blocks = range(first // rows, -(-(first + shape[0]) // rows))
    drawn = torch.cat([_block(name, number, rows * width) for number in blocks])
    start = (first - blocks[0] * rows) * width
    return drawn[start : start + shape.numel()].view(shape)


def _block(name: str, number: int, elements: int) -> Tensor:
    digest = blake3(f"{name}/{number}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.rand(elements, generator=generator) - 0.5


def first_row(tensor: Tensor) -> int:
    """Where the rows of a tensor begin that this rank holds."""
    if not isinstance(tensor, DTensor):
        return 0
    assert all(place.is_shard(0) or place.is_replicate() for place in tensor.placements)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0] if offset else 0
