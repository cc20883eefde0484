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


@torch.no_grad()
def dither_masters(tensors: Iterable[tuple[str, Tensor]], seed: int) -> None:
    """Move each weight that is exactly a bf16 number to a uniform place of its rounding interval, the same on any world size."""
    for name, tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.dtype == torch.float32 and local.numel():
            dither(local, own_part(uniform_noise(name, tuple(tensor.shape), seed), tensor))


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


def uniform_noise(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Between −½ and ½, from the seed and the name alone."""
    generator = torch.Generator().manual_seed(int.from_bytes(blake3(f"{seed}/{name}".encode()).digest()[:7], "big"))
    return torch.rand(shape, generator=generator) - 0.5


def own_part(noise: Tensor, tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that is sharded like `tensor`."""
    if not isinstance(tensor, DTensor):
        return noise
    shape, offset = compute_local_shape_and_global_offset(noise.shape, tensor.device_mesh, tensor.placements)
    return noise[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
