"""Deltas through and around the page cache: the same bytes, and a wrong base is found before its result has a name."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shoal.broadcast import Origin, OriginSettings, WeightClient, WireTensor, applying
from shoal.broadcast.applying import BlockFile, CheckedTensors
from shoal.broadcast.codec.leaves import RunHasher
from shoal.broadcast.codec.pieces import partition
from shoal.broadcast.manifest import Encoding, Manifest, ShardEntry, digest_weights
from shoal.broadcast.wire import tensor_entry
from shoal.errors import IntegrityError

from .conftest import RUN_KEY, Mirror
from .test_client import weights_of

MakeClient = Callable[..., WeightClient]
MakeMirror = Callable[..., Mirror]
SPAN_BYTES = 8192

MODELS = {
    "whole blocks": [("a", "bfloat16", 4096), ("b", "bfloat16", 12_288)],
    "an end within a block": [("a", "bfloat16", 4096), ("b", "bfloat16", 5000)],
    "no block is whole": [("flags", "bool", 3), ("a", "bfloat16", 9000), ("b", "float32", 3000)],
    "a tensor of many blocks between small ones": [("a", "float32", 1), ("b", "bfloat16", 40_000), ("c", "int64", 7)],
    "smaller than a block": [("a", "bfloat16", 2000)],
}
ITEM_BYTES = {"bool": 1, "bfloat16": 2, "float32": 4, "int64": 8}


def tensors(model: str, version: int) -> list[WireTensor]:
    found = []
    for name, dtype, count in MODELS[model]:
        data = bytearray(random.Random(name).randbytes(count * ITEM_BYTES[dtype]))
        if dtype == "bool":
            data = bytearray(byte & 1 for byte in data)
        for change in range(version):
            data[random.Random(change).randrange(len(data))] ^= 1
        found.append(WireTensor(name, dtype, (count,), bytes(data)))
    return found


def publish(origin: Origin, model: str, version: int) -> str:
    digest = origin.stage(version, tensors(model, version)).manifest_digest
    origin.announce(ledger_head="")
    return digest


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    settings = OriginSettings(keyframe_every=100, delta_from_bytes=0, span_bytes=SPAN_BYTES)
    return Origin(tmp_path / "origin", RUN_KEY, settings)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every file counts as large; holds what each block asked of the disk itself did."""
    done: list[int] = []
    around = BlockFile._around_cache

    def counted(file: BlockFile, act: Callable[[int], int], size_bytes: int, offset: int) -> int:
        done.append(around(file, act, size_bytes, offset))
        return done[-1]

    monkeypatch.setattr(applying, "LARGE_SHARE", 0.0)
    monkeypatch.setattr(BlockFile, "_around_cache", counted)
    return done


@pytest.mark.parametrize("model", MODELS)
def test_a_large_file_passes_the_page_cache_by_and_has_the_same_bytes(
    model: str, origin: Origin, make_mirror: MakeMirror, make_client: MakeClient, direct: list[int]
) -> None:
    client = make_client(make_mirror().url)
    for version in range(4):
        path = client.fetch_version(version, publish(origin, model, version))
        assert weights_of(path) == b"".join(bytes(tensor.data) for tensor in tensors(model, version))
    assert direct
    if model == "whole blocks" and takes_direct_requests(path / "model.safetensors"):
        assert set(direct) == {SPAN_BYTES}


def takes_direct_requests(path: Path) -> bool:
    """Not every file system does."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_a_disk_that_takes_no_such_requests_is_used_through_the_cache(
    origin: Origin,
    make_mirror: MakeMirror,
    make_client: MakeClient,
    direct: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*arguments: object) -> int:
        raise OSError(22, "Invalid argument")

    client = make_client(make_mirror().url)
    client.fetch_version(0, publish(origin, "whole blocks", 0))
    read = os.preadv
    monkeypatch.setattr(applying, "_open_direct", lambda path, file: -1)
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: refuses() if file == -1 else read(file, buffers, at))
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: refuses() if file == -1 else write(file, data, at))
    monkeypatch.setattr(BlockFile, "close", lambda file: None)
    path = client.fetch_version(1, publish(origin, "whole blocks", 1))
    assert weights_of(path) == b"".join(bytes(tensor.data) for tensor in tensors("whole blocks", 1))
    assert set(direct) == {0}


def test_a_system_without_such_requests_uses_the_cache(
    origin: Origin,
    make_mirror: MakeMirror,
    make_client: MakeClient,
    direct: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "O_DIRECT")  # as on macOS
    client = make_client(make_mirror().url)
    for version in range(2):
        path = client.fetch_version(version, publish(origin, "whole blocks", version))
    assert weights_of(path) == b"".join(bytes(tensor.data) for tensor in tensors("whole blocks", 1))
    assert set(direct) == {0}


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_base_that_the_disk_changed_is_found_in_any_block(
    share: float, origin: Origin, make_mirror: MakeMirror, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetched in full instead, as the base is here no more."""
    monkeypatch.setattr(applying, "LARGE_SHARE", share)
    mirror = make_mirror()
    client = make_client(mirror.url)
    first = client.fetch_version(0, publish(origin, "whole blocks", 0)) / "model.safetensors"
    for place, version in ((5000, 1), (20_000, 2), (36_000, 3)):
        data = bytearray(first.read_bytes())
        data[place] ^= 1
        first.write_bytes(data)
        newest = publish(origin, "whole blocks", version)
        mirror.requests.clear()
        path = client.fetch_version(version, newest)
        assert weights_of(path) == b"".join(bytes(tensor.data) for tensor in tensors("whole blocks", version))
        first = path / "model.safetensors"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="another system")
def test_buffers_are_no_shared_memory() -> None:
    """Which gets small pages, and each request to the disk is cut where pages are not neighbours."""

    def shared_bytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssShmem")))

    before = shared_bytes()
    buffer = applying.aligned_buffer(8 << 20)
    buffer[:] = 1
    assert shared_bytes() == before


def test_a_tensor_with_another_digest_is_refused() -> None:
    given = tensors("a tensor of many blocks between small ones", 0)
    entries = tuple(map(tensor_entry, given))
    encoding = Encoding(
        kind="full", shards=(ShardEntry(digest="a" * 64, size_bytes=sum(e.size_bytes for e in entries)),)
    )
    manifest = Manifest(
        run_id="run", version=3, tensors=entries, weights_digest=digest_weights(entries), encodings=(encoding,)
    )
    data = np.frombuffer(b"".join(bytes(tensor.data) for tensor in given), np.uint8).copy()

    def pass_all() -> None:
        checked, at = CheckedTensors(manifest), 0
        for block in partition(entries, SPAN_BYTES):
            run = RunHasher()
            for piece in block:
                part = data[at : at + piece.size_bytes].data
                run.update(part, piece.start * piece.item_bytes, entries[piece.tensor].size_bytes)
                at += piece.size_bytes
            checked.take(block, run)

    pass_all()
    for place, name in ((2, "a"), (70_000, "b"), (len(data) - 1, "c")):
        data[place] ^= 1
        with pytest.raises(IntegrityError, match=f"Tensor {name} of version 3"):
            pass_all()
        data[place] ^= 1
