"""How often bytes of a full version are hashed and read, from the publisher's tensors to the client's file."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.broadcast import Origin, OriginSettings, WeightClient, WireTensor, staging, store, wire
from shoal.broadcast.codec.leaves import LEAF_BYTES
from shoal.broadcast.codec.pieces import read_at
from shoal.broadcast.manifest import Encoding, Manifest, TensorEntry, digest_weights, open_manifest, safetensors_header
from shoal.broadcast.staging import StagedWeights
from shoal.errors import IntegrityError
from shoal.files import digest_bytes

from .conftest import RUN_KEY, Mirror

# Two leaves and a rest, a small one, one that fills a leaf, an empty one.
SIZES = (2 * LEAF_BYTES + 1000, 300, LEAF_BYTES, 0, 70)


def tensors() -> list[WireTensor]:
    draw = random.Random(1)
    return [WireTensor(f"w{n}", "uint8", (size,), draw.randbytes(size)) for n, size in enumerate(SIZES)]


def all_bytes() -> bytes:
    return b"".join(bytes(tensor.data) for tensor in tensors())


def published(root: Path, shard_bytes: int) -> tuple[str, Manifest]:
    origin = Origin(root, RUN_KEY, OriginSettings(shard_bytes=shard_bytes))
    digest = origin.stage(0, tensors()).manifest_digest
    origin.announce(ledger_head="")
    return digest, open_manifest(origin.store.read("manifests", digest), RUN_KEY.public)


def count_bytes(monkeypatch: pytest.MonkeyPatch, modules: list[Any], name: str, size: Callable[..., int]) -> list[int]:
    counted: list[int] = []

    def wrap(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            counted.append(size(*arguments))
            return inner(*arguments)

        return call

    for module in modules:
        monkeypatch.setattr(module, name, wrap(getattr(module, name)))
    return counted


def test_a_publisher_hashes_large_leaves_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = count_bytes(monkeypatch, [wire, store], "digest_bytes", len)
    _, manifest = published(tmp_path, LEAF_BYTES)
    encoding = manifest.encoding("full")
    assert encoding is not None
    assert [shard.size_bytes for shard in encoding.shards] == [
        LEAF_BYTES,
        LEAF_BYTES,
        1300,
        LEAF_BYTES,
        70,
    ]
    manifest_bytes = sum(path.stat().st_size for path in (tmp_path / "manifests").iterdir())
    assert sum(hashed) == sum(SIZES) + 1300 + manifest_bytes  # small leaves also as a part of their shard


@pytest.mark.parametrize("shard_bytes", [LEAF_BYTES, 3 * LEAF_BYTES, 5000, 1])
def test_shards_of_any_size_hold_the_tensors_in_order(shard_bytes: int, tmp_path: Path) -> None:
    if shard_bytes == 1:
        small = [WireTensor("w", "uint8", (9,), b"abcdefghi")]
        origin = Origin(tmp_path, RUN_KEY, OriginSettings(shard_bytes=1))
        digest, expected = origin.stage(0, small).manifest_digest, b"abcdefghi"
        manifest = open_manifest(origin.store.read("manifests", digest), RUN_KEY.public)
    else:
        (_, manifest), expected = published(tmp_path, shard_bytes), all_bytes()
    shards = [(tmp_path / "shards" / shard.digest).read_bytes() for shard in manifest.shards]
    assert b"".join(shards) == expected
    assert all(len(shard) <= shard_bytes for shard in shards)
    assert [digest_bytes(shard) for shard in shards] == [shard.digest for shard in manifest.shards]


@pytest.mark.parametrize("shard_bytes", [LEAF_BYTES, 3 * LEAF_BYTES, 500_000])
def test_a_client_reads_back_only_leaves_that_no_shard_holds(
    shard_bytes: int, tmp_path: Path, make_client: Callable[..., WeightClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, _ = published(tmp_path / "site", shard_bytes)
    mirror = Mirror(tmp_path / "site")
    try:
        read = count_bytes(monkeypatch, [staging], "read_at", lambda file, view, offset: len(view))
        path = make_client(mirror.url).fetch_version(0, digest) / "model.safetensors"
    finally:
        mirror.close()
    assert path.read_bytes().endswith(all_bytes())
    divided = [size for size in SIZES if size > shard_bytes] if shard_bytes < LEAF_BYTES else []
    # The last leaf of the first tensor is small enough for a shard, whatever came before it.
    assert sum(read) == sum(divided) - (1000 if divided else 0)


def staged(tmp_path: Path, manifest: Manifest) -> tuple[StagedWeights, Encoding]:
    encoding = manifest.encoding("full")
    assert encoding is not None
    return StagedWeights(tmp_path / "staging", manifest, encoding), encoding


def test_what_an_earlier_process_wrote_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, manifest = published(tmp_path / "site", LEAF_BYTES)
    shards = [memoryview((tmp_path / "site" / "shards" / shard.digest).read_bytes()) for shard in manifest.shards]
    first, _ = staged(tmp_path, manifest)
    assert len(first.missing()) == len(shards)
    for index in (0, 2):
        first.write(index, shards[index])
    first.close()
    monkeypatch.setattr(staging, "read_at", read_at)
    read = count_bytes(monkeypatch, [staging], "read_at", lambda file, view, offset: len(view))
    again, _ = staged(tmp_path, manifest)
    assert [index for index, _ in again.missing()] == [1, 3, 4]
    for index in (1, 3, 4):
        again.write(index, shards[index])
    again.finish(tmp_path / "ready")
    assert sum(read) == LEAF_BYTES + 1300
    assert (tmp_path / "ready" / "model.safetensors").read_bytes().endswith(all_bytes())


def test_what_the_disk_lost_of_an_earlier_process_is_noticed(tmp_path: Path) -> None:
    _, manifest = published(tmp_path / "site", LEAF_BYTES)
    shards = [memoryview((tmp_path / "site" / "shards" / shard.digest).read_bytes()) for shard in manifest.shards]
    first, _ = staged(tmp_path, manifest)
    assert first.missing()
    first.write(0, shards[0])
    first.close()
    with open(tmp_path / "staging" / "weights" / "model.safetensors", "r+b") as file:
        os.pwrite(file.fileno(), b"\0" * 4096, len(safetensors_header(manifest.tensors)))
    again, _ = staged(tmp_path, manifest)
    for index, _ in again.missing():
        again.write(index, shards[index])
    with pytest.raises(IntegrityError, match="Tensor w0 of version 0"):
        again.finish(tmp_path / "ready")
    again.close()


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_tensors_that_do_not_follow_from_the_shards_are_refused(number: int, tmp_path: Path) -> None:
    """A publisher that signs shards of one model and tensors of another."""
    _, honest = published(tmp_path / "site", LEAF_BYTES)
    entries = list(honest.tensors)
    entries[number] = TensorEntry.model_validate({**dict(entries[number]), "digest": "a" * 64})
    manifest = Manifest(
        run_id=honest.run_id,
        version=0,
        tensors=tuple(entries),
        weights_digest=digest_weights(entries),
        encodings=honest.encodings,
    )
    weights, encoding = staged(tmp_path, manifest)
    for index, shard in weights.missing():
        weights.write(index, memoryview((tmp_path / "site" / "shards" / shard.digest).read_bytes()))
    assert len(encoding.shards) == 5
    with pytest.raises(IntegrityError, match=f"Tensor w{number} of version 0"):
        weights.finish(tmp_path / "ready")
    weights.close()
    assert not (tmp_path / "ready").exists()
