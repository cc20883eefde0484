"""A policy spread over ranks with FSDP2, built so that no rank ever holds the whole model.

The module is made without memory for its parameters, sharded layer by layer, and then each rank reads only its own rows of each
tensor from the safetensors, whether they have the module's names or the hub's. Trained parameters are fp32 shards; gathered copies
and products use the compute dtype, reductions fp32.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from shoal.policy import build_model
from shoal.policy.architecture import decoder_blocks, meta_model
from shoal.policy.directory import read_config
from shoal.policy.models import build_shell
from shoal.policy.weights import unique_tensors
from shoal.training.model.distributed import World
from shoal.training.model.hub_names import Source, convert, find_sources, makes_whole, stored_names


def build_for(directory: Path, world: World, dtype: str) -> nn.Module:
    """The causal LM: whole on its device for one rank, without memory for several."""
    if world.size == 1:
        return build_model(directory, dtype, str(world.device))
    if not _is_readable_by_rows(directory):
        return build_model(directory, dtype)  # only Transformers can convert these files: every rank loads them all
    return build_shell(directory, dtype)


def shard(policy: nn.Module, model: Any, directory: Path, world: World, compute_dtype: torch.dtype) -> None:
    """Shard `policy`, the root that calls `model`, over all ranks and fill it from the directory."""
    is_shell = any(parameter.is_meta for parameter in model.parameters())
    mesh = init_device_mesh(world.device.type, (world.size,))
    low = compute_dtype if compute_dtype != torch.float32 else None
    precision = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in decoder_blocks(model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    # The root keeps its parameters gathered by default; after a pass without backward they would not be the sharded ones.
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    policy._apply(lambda tensor: _placed(tensor, world.device))  # type: ignore[no-untyped-call]
    if is_shell:
        load_own_rows(model, directory, world)


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


@torch.no_grad()
def load_own_rows(model: nn.Module, directory: Path, world: World) -> None:
    """Each rank reads its rows of every tensor; buffers and tensors that are not sharded are read whole."""
    tensors, files = unique_tensors(model), stored_names(directory)
    with ExitStack() as opened:
        readers = {
            file: opened.enter_context(safe_open(file, "pt", device="cpu")) for file in sorted(set(files.values()))
        }
        skeleton = meta_model(read_config(directory)) if (directory / "config.json").exists() else model
        for target, source in find_sources(skeleton, list(files)).items():
            if source.converter is None:
                (name,) = source.stored[next(iter(source.stored))]
                if target in tensors:
                    _copy_rows(tensors[target], readers[files[name]].get_slice(name), world)
            else:
                _copy_converted(
                    tensors, target, source, skeleton, lambda name: readers[files[name]].get_tensor(name), world
                )


def _copy_rows(tensor: Tensor, rows: Any, world: World) -> None:
    if not isinstance(tensor, DTensor):
        tensor.copy_(rows[...])  # [:] would refuse a tensor without dimensions
        return
    local = tensor.to_local()
    if len(local):  # a tensor with fewer rows than ranks leaves the last ranks with none
        local.copy_(rows[_own_rows(tensor, world)])


def _own_rows(tensor: Tensor, world: World) -> slice:
    if not isinstance(tensor, DTensor):
        return slice(None)
    assert tensor.placements == (Shard(0),)
    size = -(-tensor.shape[0] // world.size)
    return slice(world.rank * size, world.rank * size + len(tensor.to_local()))


def _copy_converted(
    tensors: dict[str, Tensor], target: str, source: Source, skeleton: nn.Module, read: Any, world: World
) -> None:
    rows = _own_rows(tensors[target], world) if target in tensors else slice(None)
    if source.is_list_of_rows and rows.start is not None and rows.start >= rows.stop:
        return
    for name, made in convert(target, source, skeleton, read, rows).items():
        if name in tensors:
            tensor = tensors[name]
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if len(local):
                local.copy_(made if source.is_list_of_rows else made[_own_rows(tensor, world)])


def _is_readable_by_rows(directory: Path) -> bool:
    skeleton = meta_model(read_config(directory))
    sources = find_sources(skeleton, list(stored_names(directory)))
    return makes_whole(skeleton, sources, set(unique_tensors(skeleton)))
