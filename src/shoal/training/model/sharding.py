"""A policy spread over ranks with FSDP2, built so that no rank ever holds the whole model.

The module is made with untouched memory, sharded layer by layer, and then each rank reads only its own rows of each tensor from
the safetensors. Trained parameters are fp32 shards; gathered copies and products use the compute dtype, reductions fp32.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from shoal.policy import build_empty_model, build_model
from shoal.policy.architecture import decoder_blocks, meta_model
from shoal.policy.directory import read_config, weight_files
from shoal.policy.weights import unique_tensors
from shoal.training.model.distributed import World


def build_for(directory: Path, world: World, dtype: str) -> nn.Module:
    """The causal LM: whole on its device for one rank, an empty shell on CPU for several."""
    if world.size == 1:
        return build_model(directory, dtype, str(world.device))
    if not _names_match(directory):
        return build_model(directory, dtype)  # only Transformers can convert these files: every rank loads them all
    return build_empty_model(directory, dtype)


def shard(policy: nn.Module, model: Any, directory: Path, world: World, compute_dtype: torch.dtype) -> None:
    """Shard `policy`, the root that calls `model`, over all ranks and fill it from the directory."""
    complete = not _names_match(directory)
    mesh = init_device_mesh(world.device.type, (world.size,))
    low = compute_dtype if compute_dtype != torch.float32 else None
    precision = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    for layer in decoder_blocks(model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    # The root keeps its parameters gathered by default; after a pass without backward they would not be the sharded ones.
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    policy.to(world.device)
    if not complete:
        load_own_rows(model, directory, world)


@torch.no_grad()
def load_own_rows(model: nn.Module, directory: Path, world: World) -> None:
    """Each rank reads its rows of every tensor; buffers and tensors that are not sharded are read whole."""
    tensors = unique_tensors(model)
    for file in weight_files(directory):
        with safe_open(file, framework="pt", device="cpu") as reader:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                if name in tensors:
                    _copy_rows(tensors[name], reader.get_slice(name), world)


def _copy_rows(tensor: Tensor, rows: Any, world: World) -> None:
    if not isinstance(tensor, DTensor):
        tensor.copy_(rows[...])  # [:] would refuse a tensor without dimensions
        return
    assert tensor.placements == (Shard(0),)
    size = -(-tensor.shape[0] // world.size)
    local = tensor.to_local()
    if len(local):  # a tensor with fewer rows than ranks leaves the last ranks with none
        local.copy_(rows[world.rank * size : world.rank * size + len(local)])


def _names_match(directory: Path) -> bool:
    """Whether the files name tensors as the module does."""
    wanted = set(unique_tensors(meta_model(read_config(directory))))
    found: set[str] = set()
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as reader:
            found |= set(reader.keys())
    return wanted <= found
