"""What a policy is on the wire: numbers in bf16, everything else bit for bit, of any number of dimensions."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shoal.broadcast import Origin, OriginServer, OriginSettings, WeightClient
from shoal.identity import Keypair
from shoal.policy.directory import ArchitectureError, ModelError
from shoal.policy.weights import WireCopy, load_weights
from shoal.training import Checkpoints, World

KEY = Keypair.from_seed(b"k" * 32)


class Odd(nn.Module):
    """A scale without dimensions, counters that bf16 cannot hold, and flags before a weight."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(100_003 + seed))
        self.register_buffer("table", torch.tensor([[2**40 + 1, -7], [0, 99_841]]))
        self.register_buffer("bytes", torch.arange(5, dtype=torch.uint8))
        self.scale = nn.Parameter(torch.tensor(1.25 + seed))
        self.weight = nn.Parameter(torch.randn(300, 7, generator=generator).bfloat16().float())
        self.register_buffer("running", torch.rand(3, generator=generator))


def same(first: nn.Module, second: nn.Module) -> None:
    for (name, mine), theirs in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert mine.dtype == theirs.dtype
        expected = mine if not mine.is_floating_point() else mine.bfloat16().to(mine.dtype)
        assert torch.equal(expected, theirs), name


@pytest.fixture
def published(tmp_path: Path) -> Iterator[tuple[Origin, WeightClient]]:
    origin = Origin(tmp_path / "origin", KEY, OriginSettings(delta_from_bytes=0, shard_bytes=1000, span_bytes=999))
    server = OriginServer(origin.store, "127.0.0.1", 0)
    server.start()
    client = WeightClient(KEY.public, lambda: [server.url], tmp_path / "client")
    yield origin, client
    client.close()
    server.stop()


def test_a_policy_with_odd_tensors_arrives_in_full_and_by_delta(published: tuple[Origin, WeightClient]) -> None:
    origin, client = published
    model = Odd()
    copy = WireCopy(model)
    for version, kind in enumerate(["full", "delta", "delta"]):
        with torch.no_grad():
            model.get_buffer("count").add_(version)
            model.weight[version] += 1
        publication = origin.stage(version, copy.take())
        origin.announce(ledger_head="")
        assert publication.kind == kind
        arrived = Odd(seed=9)
        load_weights(arrived, client.fetch_version(version, publication.manifest_digest))
        same(model, arrived)


def test_what_is_not_floating_point_comes_last(published: tuple[Origin, WeightClient]) -> None:
    dtypes = [tensor.dtype for tensor in WireCopy(Odd()).take()]
    assert dtypes == ["bfloat16"] * 3 + ["bool", "int64", "int64", "uint8"]


def test_a_copy_is_not_changed_by_the_model(published: tuple[Origin, WeightClient]) -> None:
    model = Odd()
    count = next(tensor for tensor in WireCopy(model).take() if tensor.name == "count")
    before = bytes(count.data)
    model.get_buffer("count").add_(1)
    assert bytes(count.data) == before


def test_a_type_that_nobody_can_read_is_refused() -> None:
    model = Odd()
    model.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ModelError, match="wave has dtype"):
        WireCopy(model).take()


@pytest.mark.parametrize(("name", "dtype"), [("count", torch.bfloat16), ("count", torch.int32), ("scale", torch.int64)])
def test_a_file_that_would_round_a_number_is_refused_whole(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = Odd()
    tensors = {key: value.contiguous() for key, value in Odd(seed=1).state_dict().items()}
    save_file(tensors | {name: tensors[name].to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ArchitectureError, match=f"{name} in .* is stored as"):
        load_weights(model, tmp_path)
    assert torch.equal(model.weight, Odd().weight)


def test_checkpoints_keep_every_bit(tmp_path: Path) -> None:
    model, restored = Odd(), Odd(seed=5)
    world = World.join("cpu")
    for module, act in ((model, "save"), (restored, "load")):
        optimiser = torch.optim.AdamW(module.parameters())
        with Checkpoints(tmp_path, world, keep=1) as checkpoints:
            checkpoints.save(1, module, optimiser, {}) if act == "save" else checkpoints.load(1, module, optimiser)
    for mine, theirs in zip(model.state_dict().values(), restored.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_file_of_the_wire_is_plain_safetensors(published: tuple[Origin, WeightClient]) -> None:
    origin, client = published
    digest = origin.stage(0, WireCopy(Odd()).take()).manifest_digest
    origin.announce(ledger_head="")
    loaded = load_file(client.fetch_version(0, digest) / "model.safetensors")
    assert loaded["count"].item() == 100_003
    assert loaded["scale"].shape == ()
