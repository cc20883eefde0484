"""Disks that are full or take no bytes: what a client or relay announces is what it takes, and space that comes free is used."""

import contextlib
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.broadcast import DownloadProgress, Origin, OriginServer, OriginSettings, Relay, WeightClient, WireTensor
from shoal.broadcast.retention import lack_of_space
from shoal.broadcast.store import Bytes, DiskError, Folder, ShardStore, disk_error
from shoal.metrics import EventLog

from .conftest import RUN_KEY, Mirror, make_tensors
from .test_client import expected_weights, publish, weights_of
from .test_delta_versions import new_origin, version_bytes
from .test_delta_versions import publish as publish_delta

MakeClient = Callable[..., WeightClient]
MakeMirror = Callable[..., Mirror]
MakeRelay = Callable[..., Relay]
FULL = OSError(28, "No space left on device")


@pytest.fixture
def deltas(tmp_path: Path, make_mirror: MakeMirror) -> tuple[Origin, Mirror]:
    origin = new_origin(tmp_path / "deltas")
    return origin, make_mirror(root=origin.root)


def test_one_that_missed_several_versions_takes_no_more_disk_than_announced(
    tmp_path: Path, make_mirror: MakeMirror, make_client: MakeClient
) -> None:
    """Versions 0 to 2 are kept while 3, 4 and 5 are each made from the one before."""
    settings = OriginSettings(keyframe_every=100, delta_from_bytes=0)
    origin = Origin(tmp_path / "large", RUN_KEY, settings)
    data = bytearray(random.Random(0).randbytes(1_000_000))

    def publish_next(version: int) -> str:
        data[version] ^= 1
        digest = origin.stage(version, [WireTensor("w", "bfloat16", (500_000,), bytes(data))]).manifest_digest
        origin.announce(ledger_head="")
        return digest

    client = make_client(make_mirror(root=origin.root).url, keep_versions=3)
    for version in range(3):
        client.fetch_version(version, publish_next(version))
    for version in range(3, 6):
        newest = publish_next(version)
    announced = client.preview()
    assert announced is not None
    held: list[int] = []
    path = client.fetch_version(5, newest, on_progress=lambda progress: held.append(client.held_bytes()))
    assert weights_of(path) == data
    blocks = 20 * 4096  # of journals, headers and the ends of files
    assert 4.9 * announced.size_bytes < max(held) < 3 * announced.size_bytes + announced.staging_bytes + blocks


def test_a_delta_that_does_not_fit_is_refused_before_it_is_fetched(
    deltas: tuple[Origin, Mirror], make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, mirror = deltas
    client = make_client(mirror.url)
    client.fetch_version(0, publish_delta(origin, 0))
    newest = publish_delta(origin, 1)
    mirror.requests.clear()
    free = SimpleNamespace(f_bavail=0, f_frsize=4096)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstatvfs", lambda file: free)
        with pytest.raises(DiskError, match="no space"):
            client.fetch_version(1, newest)
    assert not [path for path in mirror.requests if path.startswith("/shards")]
    assert not client._staging.path(newest, "delta").exists()
    assert weights_of(client.fetch_version(1, newest)) == version_bytes(1)


def test_what_is_still_being_deleted_is_waited_for(
    deltas: tuple[Origin, Mirror], make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has room for two copies; a large file takes a while to go."""
    origin, mirror = deltas
    for version in range(4):
        newest = publish_delta(origin, version)
    client = make_client(mirror.url)
    asked, reserve, remove = threading.Event(), os.posix_fallocate, shutil.rmtree

    def slow_remove(path: Path, *arguments: object, **options: object) -> None:
        if Path(path).parent.name == "trash":
            assert asked.wait(10)
        remove(path, *arguments, **options)  # type: ignore[arg-type]

    def refuse_while_deleting(file: int, start: int, size: int) -> None:
        if any(client._trash._directory.iterdir()):
            asked.set()
            raise FULL
        reserve(file, start, size)

    monkeypatch.setattr(shutil, "rmtree", slow_remove)
    monkeypatch.setattr(os, "posix_fallocate", refuse_while_deleting)
    assert weights_of(client.fetch_version(3, newest)) == version_bytes(3)
    assert asked.is_set()


def test_a_fetch_that_was_begun_on_a_disk_that_is_read_only_now_ends_in_one_sentence(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, client = publish(origin), make_client(make_mirror().url)

    class StoppedError(Exception):
        pass

    def stop(progress: DownloadProgress) -> None:
        if progress.bytes_done:
            raise StoppedError

    with pytest.raises(StoppedError):
        client.fetch_version(0, digest, on_progress=stop)
    opened = os.open

    def refuses(*arguments: object, **options: object) -> None:
        raise OSError(30, "Read-only file system")

    def only_reads(path: str, flags: int, *arguments: int, **options: int) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            refuses()
        return opened(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", only_reads)
    for name in ("unlink", "utime", "replace", "mkdir", "rmdir"):
        monkeypatch.setattr(os, name, refuses)
    with pytest.raises(DiskError, match="Read-only") as caught:
        client.fetch_version(0, digest)
    assert caught.value.hint


def test_a_head_that_cannot_be_kept_is_no_failure_of_a_relay(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(origin)
    client = make_client(make_mirror().url)

    def full(*arguments: object, **options: object) -> None:
        raise FULL

    monkeypatch.setattr("shoal.broadcast.heads.write_atomic", full)
    with pytest.raises(DiskError, match="no space"):
        client.head(deadline_s=300)  # at once: asking again would not help
    assert [report.failures for report in client.reports()] == [0]


class SmallDisk:
    """A store refuses what would take it past `capacity` bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path, capacity: int) -> None:
        self.refused = 0
        put = ShardStore.put

        def put_if_it_fits(store: ShardStore, folder: Folder, data: Bytes, digest: str | None = None) -> str:
            if store.root == root and used_bytes(root) + len(data) > capacity:
                self.refused += 1
                raise disk_error(FULL, root)
            return put(store, folder, data, digest)

        monkeypatch.setattr(ShardStore, "put", put_if_it_fits)


def used_bytes(root: Path) -> int:
    used = 0
    for folder in ("shards", "manifests"):
        for path in (root / folder).iterdir():
            with contextlib.suppress(FileNotFoundError):  # another thread has just renamed it
                used += path.stat().st_size
    return used


def test_a_full_relay_frees_space_for_a_new_head(
    tmp_path: Path,
    make_mirror: MakeMirror,
    make_relay: MakeRelay,
    make_client: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even the manifest of the new version fits before the old one is gone."""
    origin = Origin(tmp_path / "one", RUN_KEY, OriginSettings(shard_bytes=1000, keep_versions=1))
    monkeypatch.setattr("shoal.broadcast.relay.AFTER_TROUBLE_S", 0.01)
    publish(origin)
    manifest_bytes = sum(path.stat().st_size for path in (origin.root / "manifests").iterdir())
    disk = SmallDisk(monkeypatch, tmp_path / "relay", len(expected_weights()) + manifest_bytes + 100)
    relay = make_relay(make_mirror(root=origin.root).url, grace_s=0)
    client = make_client(relay.url)
    client.head(newer_than=0, wait_s=20)
    newest = origin.stage(1, make_tensors(seed=1)).manifest_digest
    for _ in range(2000):
        if relay.complete:
            break
        threading.Event().wait(0.01)
    assert relay.complete
    assert not disk.refused
    origin.announce(ledger_head="")
    client.head(newer_than=1, wait_s=20)
    assert weights_of(client.fetch_version(1, newest)) == expected_weights(1)
    assert disk.refused


def test_a_relay_that_cannot_hold_the_run_says_so_at_once(
    origin: Origin, make_mirror: MakeMirror, make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(origin)
    said: list[str] = []
    heard = threading.Event()

    class Heard(EventLog):
        def event(self, name: str, /, **fields: object) -> None:
            if name == "trouble":
                said.append(str(fields["reason"]))
                heard.set()

    usage = SimpleNamespace(free=5_000)
    monkeypatch.setattr("shoal.broadcast.retention.shutil.disk_usage", lambda folder: usage)
    relay = make_relay(make_mirror().url, metrics=Heard())
    assert heard.wait(10)
    assert "need 12.0 kB more in" in said[0]
    assert "where 5.0 kB are" in said[0]
    assert str(relay._root) in said[0]


def test_a_relay_that_is_stopped_while_its_disk_is_full_has_not_received_what_it_held(
    origin: Origin, make_mirror: MakeMirror, make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(origin)
    is_full = threading.Event()

    def put(self: ShardStore, folder: Folder, data: Bytes, digest: str | None = None) -> str:
        if folder == "shards" and self.root.name == "relay":
            is_full.set()
            raise disk_error(FULL, self.root)
        return real_put(self, folder, data, digest)

    real_put = ShardStore.put
    monkeypatch.setattr(ShardStore, "put", put)
    arrived: list[str] = []
    relay = make_relay(make_mirror().url)
    monkeypatch.setattr(relay._progress, "arrived", lambda digest, was_here: arrived.append(digest))
    assert is_full.wait(10)
    relay.stop()
    assert not arrived
    assert not relay.complete


def test_what_will_be_removed_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ShardStore(tmp_path)
    old, kept = store.put("shards", b"o" * 600), store.put("shards", b"k" * 500)
    usage = SimpleNamespace(free=400)
    monkeypatch.setattr("shoal.broadcast.retention.shutil.disk_usage", lambda folder: usage)
    assert lack_of_space(store, {old: 600, kept: 500}) == ""
    assert lack_of_space(store, {kept: 500, "a" * 64: 1000}) == ""
    assert "will be free" in lack_of_space(store, {kept: 500, "a" * 64: 1001})


def test_the_head_is_signed_again_after_a_full_disk_was_cured(origin: Origin) -> None:
    again, calls = threading.Event(), 0

    def refresh() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise disk_error(FULL, origin.root)
        again.set()

    said: list[object] = []

    class Heard(EventLog):
        def event(self, name: str, /, **fields: object) -> None:
            said.append((name, fields["reason"]))

    server = OriginServer(origin.store, "127.0.0.1", 0, metrics=Heard(), refresh=refresh, refresh_every_s=0.01)
    server.start()
    try:
        assert again.wait(10)
    finally:
        server.stop()
    assert said[0] == ("trouble", str(disk_error(FULL, origin.root)))
