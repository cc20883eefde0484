"""What each rank reads of a model's files."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from shoal.policy.architecture import decoder_blocks
from shoal.training import World
from shoal.training.model.sharding import load_own_rows


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.0))
        self.weight = nn.Parameter(torch.zeros(3, 2))
        self.register_buffer("count", torch.tensor(0))


def test_tensors_that_are_not_sharded_are_read_whole_whatever_their_dimensions(tmp_path: Path) -> None:
    weight = torch.arange(6.0).view(3, 2)
    tensors = {"scale": torch.tensor(1.5), "weight": weight, "count": torch.tensor(100_003)}
    save_file(tensors, tmp_path / "model.safetensors")
    model = Scaled()
    load_own_rows(model, tmp_path, World.join("cpu"))
    assert model.scale.item() == 1.5
    assert torch.equal(model.weight, weight)
    assert model.get_buffer("count").item() == 100_003


class Mixer(nn.Module):
    pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = Mixer()


class Embeddings(nn.Module):
    pass


class Nested(nn.Module):
    """Names its blocks, what is inside them, and its embeddings as units, as some architectures do."""

    _no_split_modules = ("Embeddings", "Block", "Mixer")

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.layers = nn.ModuleList([Block(), Block()])


def test_of_nested_units_the_repeated_outermost_are_layers() -> None:
    """Sharding an outer unit before the one inside it raised."""
    model = Nested()
    assert decoder_blocks(model) == list(model.layers)
