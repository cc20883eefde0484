"""Adapters that a calibration is made with: one of the size that training reaches, and the same merged into its base."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shoal.config import LoraConfig
from shoal.files import CONFIG_FILE
from shoal.policy.lora.files import (
    as_factors,
    factor_name,
    factor_shapes,
    merge,
    read_factors,
    write_adapter,
)
from shoal.policy.lora.targets import target_names
from shoal.policy.models import build_model

TYPICAL_CHANGE = 0.01
"""Root mean square of what the adapter adds to a matrix, as a share of that of the matrix."""


@torch.no_grad()
def write_typical(directory: Path, base: Path, lora: LoraConfig, seed: int = 0) -> Path:
    """A PEFT directory with random factors. A new adapter has B = 0 and would exercise nothing."""
    model: Any = build_model(base)
    names, generator, tensors = (
        target_names(model, lora),
        torch.Generator().manual_seed(seed),
        dict[str, torch.Tensor](),
    )
    for name, (down, up) in _shapes_by_layer(model, names, lora.rank).items():
        weight = model.get_submodule(name).weight
        factor_a = (torch.rand(down, generator=generator) - 0.5) * (2 / down[1] ** 0.5)
        factor_b = torch.randn(up, generator=generator)
        change = lora.scale * float((factor_b @ factor_a).square().mean().sqrt())
        tensors[factor_name(name, "A")] = factor_a
        tensors[factor_name(name, "B")] = factor_b * (TYPICAL_CHANGE * float(weight.square().mean().sqrt()) / change)
    write_adapter(directory, tensors, lora, base=str(base))
    return directory


@contextmanager
def merged_model(base: Path, adapter: Path, lora: LoraConfig) -> Iterator[Path]:
    """The adapter added to its base and rounded to bf16: what costs a cheat least to serve."""
    model: Any = build_model(base)
    names = target_names(model, lora)
    factors = read_factors(adapter, factor_shapes(model, names, lora.rank))
    merge(model, as_factors(factors, names, lora.scale))
    with tempfile.TemporaryDirectory() as temporary:
        model.to(torch.bfloat16).save_pretrained(temporary)
        shutil.copyfile(base / CONFIG_FILE, Path(temporary) / CONFIG_FILE)
        yield Path(temporary)


def _shapes_by_layer(model: Any, names: list[str], rank: int) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    shapes = factor_shapes(model, names, rank)
    return {name: (shapes[factor_name(name, "A")], shapes[factor_name(name, "B")]) for name in names}
