"""What stays downloadable after it left the head."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.broadcast import Origin, OriginServer, OriginSettings, WeightClient
from shoal.broadcast.manifest import open_manifest
from shoal.metrics import EventLog

from .conftest import RUN_KEY, make_tensors
from .test_client import weights_of
from .test_delta_versions import new_origin, publish, version_bytes
from .test_origin import Clock

MakeClient = Callable[..., WeightClient]


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    return new_origin(tmp_path / "origin")


class Plans(EventLog):
    """Remembers what each fetch was planned to cost."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[object, object]] = []

    def event(self, name: str, /, **fields: object) -> None:
        if name == "fetch_planned":
            self.seen.append((fields["deltas"], fields["bytes"]))


def test_a_client_whose_download_took_long_catches_up_with_deltas(
    origin: Origin, origin_server: OriginServer, make_client: MakeClient
) -> None:
    """Ten versions, two keyframes and the whole head later."""
    plans = Plans()
    client = make_client(origin_server.url, metrics=plans)
    client.fetch_version(1, publish(origin, 1))
    for version in range(2, 12):
        newest = publish(origin, version)
    assert origin.head is not None
    assert origin.head.versions[0].version > 8
    assert weights_of(client.fetch_version(11, newest)) == version_bytes(11)
    (_, (deltas, size_bytes)) = plans.seen
    assert deltas == 10
    assert int(str(size_bytes)) < 20_000


def test_old_deltas_take_no_more_than_half_of_the_model(origin: Origin) -> None:
    for version in range(60):
        publish(origin, version)
    held = [origin.store.read("manifests", digest) for digest in origin.store.held("manifests")]
    deltas = [open_manifest(data, RUN_KEY.public).encoding("delta") for data in held]
    assert sum(delta.size_bytes for delta in deltas if delta is not None) < 20_000
    assert len(held) < 60


def files_of(origin: Origin, digest: str) -> list[str]:
    return [shard.digest for shard in open_manifest(origin.store.read("manifests", digest), RUN_KEY.public).shards]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def full_only(tmp_path: Path, clock: Clock) -> Origin:
    settings = OriginSettings(shard_bytes=1000, keep_versions=1, grace_s=60)
    return Origin(tmp_path / "full", RUN_KEY, settings, clock=clock, monotonic=clock)


def publish_full(origin: Origin, version: int) -> str:
    digest = origin.stage(version, make_tensors(seed=version)).manifest_digest
    origin.announce(ledger_head="")
    return digest


def test_a_version_that_is_being_read_stays_for_hours_but_not_for_ever(full_only: Origin, clock: Clock) -> None:
    old = publish_full(full_only, 0)
    shard = files_of(full_only, old)[0]
    for number in range(1, 10):
        publish_full(full_only, number)
        kept = full_only.store.has("shards", shard)
        assert kept == (number < 9)
        clock.now += 50 * 60
        full_only.store.access.touch(shard)


def test_an_unread_version_goes_although_another_one_is_read(full_only: Origin, clock: Clock) -> None:
    read, unread = publish_full(full_only, 0), publish_full(full_only, 1)
    publish_full(full_only, 2)
    clock.now += 100
    full_only.store.access.touch(files_of(full_only, read)[3])
    publish_full(full_only, 3)
    assert full_only.store.has("manifests", read)
    assert not full_only.store.has("manifests", unread)


def test_readers_hold_no_more_disk_than_what_is_needed(full_only: Origin, clock: Clock) -> None:
    digests = [publish_full(full_only, version) for version in range(4)]
    clock.now += 100
    for digest in digests[:3]:
        full_only.store.access.touch(digest)
    publish_full(full_only, 4)
    assert [full_only.store.has("manifests", digest) for digest in digests] == [False, False, True, True]
