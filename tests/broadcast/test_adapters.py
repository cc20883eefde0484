"""Versions that are adapters: their base is named by every manifest, mirrored with them, fetched once and kept."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.broadcast import (
    AdaptedBase,
    Origin,
    OriginServer,
    OriginSettings,
    WeightClient,
    WeightClientSettings,
    WireTensor,
)
from shoal.broadcast.manifest import open_manifest
from shoal.errors import IntegrityError
from support.samples import keypair

BASE = [WireTensor("w", "bfloat16", (64,), bytes(range(128)))]
KEY = keypair("run")


def factors(number: int) -> list[WireTensor]:
    return [WireTensor("base_model.model.w.lora_A.weight", "float32", (4,), bytes([number] * 16))]


@pytest.fixture
def published(tmp_path: Path) -> tuple[Origin, AdaptedBase]:
    """An origin whose base was published when the run was made."""
    root = tmp_path / "origin"
    base = Origin(root, KEY, OriginSettings(run_id="run")).add_base(BASE)
    settings = OriginSettings(run_id="run", adapts=base, keep_versions=2, grace_s=0, delta_from_bytes=None)
    return Origin(root, KEY, settings), base


@pytest.fixture
def url(published: tuple[Origin, AdaptedBase]) -> Iterator[str]:
    server = OriginServer(published[0].store, "127.0.0.1", 0)
    server.start()
    yield server.url
    server.stop()


def client(url: str, cache: Path, base: AdaptedBase | None) -> WeightClient:
    settings = WeightClientSettings("run", keep_versions=1, adapts=base)
    return WeightClient(KEY.public, lambda: [url], cache, settings)


def publish(origin: Origin, versions: range) -> list[str]:
    digests = []
    for version in versions:
        digests.append(origin.stage(version, factors(version)).manifest_digest)
        origin.announce(ledger_head="")
    return digests


def test_every_manifest_names_the_base(published: tuple[Origin, AdaptedBase]) -> None:
    origin, base = published
    [digest] = publish(origin, range(1))
    manifest = open_manifest(origin.store.read("manifests", digest), KEY.public)
    assert manifest.adapts == base
    assert manifest.needs == (base.manifest_digest,)


def test_the_base_outlives_all_versions_at_the_origin(published: tuple[Origin, AdaptedBase]) -> None:
    origin, base = published
    publish(origin, range(6))
    assert origin.store.recover("manifests", base.manifest_digest)
    shards = open_manifest(origin.store.read("manifests", base.manifest_digest), KEY.public).shards
    assert all(origin.store.recover("shards", shard.digest) for shard in shards)
    assert len(origin.store.held("manifests")) == 3


def test_the_base_is_there_before_the_first_version(
    published: tuple[Origin, AdaptedBase], url: str, tmp_path: Path
) -> None:
    path = client(url, tmp_path / "cache", published[1]).fetch_base(deadline_s=10)
    assert (path / "model.safetensors").read_bytes().endswith(bytes(range(128)))


def test_it_is_fetched_once_and_no_version_drives_it_out(
    published: tuple[Origin, AdaptedBase], url: str, tmp_path: Path
) -> None:
    origin, base = published
    node = client(url, tmp_path / "cache", base)
    path = node.fetch_base(deadline_s=10)
    for version, digest in enumerate(publish(origin, range(4))[-2:], start=2):
        node.fetch_version(version, digest, deadline_s=10)
    node.close()
    again = client("http://127.0.0.1:9", tmp_path / "cache", base)
    assert again.fetch_base(deadline_s=10) == path


def test_a_version_of_another_base_or_of_none_is_refused(
    published: tuple[Origin, AdaptedBase], url: str, tmp_path: Path
) -> None:
    origin, base = published
    [digest] = publish(origin, range(1))
    other = AdaptedBase(manifest_digest=base.manifest_digest, weights_digest="00" * 32)
    for wrong in (None, other):
        with pytest.raises(IntegrityError, match="not an adapter of the base that the run names"):
            client(url, tmp_path / str(wrong is None), wrong).fetch_version(0, digest, deadline_s=10)
    with pytest.raises(IntegrityError, match="other weights than its descriptor says"):
        client(url, tmp_path / "base", other).fetch_base(deadline_s=10)


def test_the_base_is_not_counted_among_what_versions_take(
    published: tuple[Origin, AdaptedBase], url: str, tmp_path: Path
) -> None:
    """Or a disk without room for a version would seem to have it."""
    origin, base = published
    node = client(url, tmp_path / "cache", base)
    node.fetch_base(deadline_s=10)
    assert node.held_bytes() == 0
    node.fetch_version(0, publish(origin, range(1))[0], deadline_s=10)
    assert node.held_bytes() > 0
