import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shoal.broadcast import Origin, OriginSettings, WireTensor
from shoal.broadcast.manifest import open_head, open_manifest
from shoal.broadcast.store import Bytes, DiskError, Folder
from shoal.broadcast.wire import TensorError
from shoal.errors import IntegrityError

from .conftest import RUN_KEY, make_tensors


def after(version: int) -> Callable[[int, int], bool]:
    """What a rewind to this version voids."""
    return lambda epoch, number: epoch < 1 and number > version


def published_bytes(origin: Origin, digest: str) -> bytes:
    manifest = open_manifest(origin.store.read("manifests", digest), RUN_KEY.public)
    encoding = manifest.encoding("full")
    assert encoding is not None
    return b"".join(origin.store.read("shards", shard.digest) for shard in encoding.shards)


def test_shards_hold_all_bytes_in_order(origin: Origin) -> None:
    tensors = make_tensors()
    publication = origin.stage(0, tensors)
    assert published_bytes(origin, publication.manifest_digest) == b"".join(bytes(tensor.data) for tensor in tensors)
    assert publication.follow_bytes == sum(len(tensor.data) for tensor in tensors)


def test_staged_version_is_invisible_until_announced(origin: Origin) -> None:
    publication = origin.stage(0, make_tensors())
    assert not (origin.root / "head.json").exists()
    origin.announce(ledger_head="ab")
    head = open_head((origin.root / "head.json").read_bytes(), RUN_KEY.public)
    assert [(entry.version, entry.manifest_digest) for entry in head.versions] == [(0, publication.manifest_digest)]
    assert head.ledger_head == "ab"


def test_staging_again_is_free_but_other_bytes_are_refused(origin: Origin) -> None:
    first = origin.stage(0, make_tensors())
    assert origin.stage(0, make_tensors()) == first
    origin.announce(ledger_head="")
    assert origin.stage(0, make_tensors()) == first
    with pytest.raises(IntegrityError, match="other weights"):
        origin.stage(0, make_tensors(seed=1))


def test_version_that_was_only_staged_may_change(origin: Origin) -> None:
    origin.stage(0, make_tensors())
    second = origin.stage(0, make_tensors(seed=1))
    assert origin.announce(ledger_head="").versions[0].manifest_digest == second.manifest_digest


def test_older_version_cannot_follow(origin: Origin) -> None:
    origin.stage(5, make_tensors())
    origin.announce(ledger_head="")
    with pytest.raises(IntegrityError, match="cannot follow"):
        origin.stage(4, make_tensors(seed=1))


def test_a_rewind_takes_voided_versions_out_of_the_head_in_one_step(origin: Origin) -> None:
    for version in range(4):
        origin.stage(version, make_tensors(seed=version))
        before = origin.announce(ledger_head="ab")
    assert origin.take_up(1, after(1), ledger_head="cd") == [2, 3]
    head = open_head((origin.root / "head.json").read_bytes(), RUN_KEY.public)
    assert [(entry.epoch, entry.version) for entry in head.versions] == [(0, 0), (0, 1)]
    assert (head.epoch, head.counter, head.ledger_head) == (1, before.counter + 1, "cd")
    assert origin.take_up(1, after(1), ledger_head="cd") == [], "a repeated call changes nothing"
    assert origin.head == head
    again = Origin(origin.root, RUN_KEY, OriginSettings(shard_bytes=1000))
    publication = again.stage(2, make_tensors(seed=9))
    later = again.announce(ledger_head="")
    assert [(entry.epoch, entry.version) for entry in later.versions] == [(0, 0), (0, 1), (1, 2)]
    assert open_manifest(again.store.read("manifests", publication.manifest_digest), RUN_KEY.public).epoch == 1


def test_the_same_weights_in_another_epoch_are_another_version(origin: Origin) -> None:
    origin.stage(0, make_tensors())
    origin.announce(ledger_head="")
    first = origin.stage(1, make_tensors(seed=1))
    origin.announce(ledger_head="")
    origin.take_up(1, after(0), ledger_head="")
    again = origin.stage(1, make_tensors(seed=1))
    assert again.weights_digest == first.weights_digest
    assert again.manifest_digest != first.manifest_digest


def test_a_version_that_was_staged_before_a_rewind_is_not_announced_after_it(origin: Origin) -> None:
    origin.stage(0, make_tensors())
    origin.announce(ledger_head="")
    origin.stage(1, make_tensors(seed=1))
    origin.take_up(1, after(0), ledger_head="")
    assert [entry.version for entry in origin.announce(ledger_head="").versions] == [0]


def test_restart_goes_on_from_the_head_it_finds(origin: Origin) -> None:
    origin.add_file(b"tokenizer")
    first = origin.stage(0, make_tensors())
    counter = origin.announce(ledger_head="").counter
    again = Origin(origin.root, RUN_KEY, OriginSettings(shard_bytes=1000))
    assert again.stage(0, make_tensors()) == first
    again.stage(1, make_tensors(seed=1))
    head = again.announce(ledger_head="")
    assert head.counter == counter + 1
    assert [entry.version for entry in head.versions] == [0, 1]
    assert len(head.files) == 1


def test_restart_repairs_damaged_shards(origin: Origin) -> None:
    digest = origin.stage(0, make_tensors()).manifest_digest
    shard = next((origin.root / "shards").iterdir())
    shard.write_bytes(b"torn")
    again = Origin(origin.root, RUN_KEY, OriginSettings(shard_bytes=1000))
    again.stage(0, make_tensors())
    assert published_bytes(again, digest) == b"".join(bytes(tensor.data) for tensor in make_tensors())


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def announce_versions(origin: Origin, *versions: int) -> None:
    for version in versions:
        origin.stage(version, make_tensors(seed=version))
        origin.announce(ledger_head="")


def test_old_versions_are_pruned_after_the_grace_period(tmp_path: Path) -> None:
    clock = Clock()
    origin = Origin(tmp_path, RUN_KEY, OriginSettings(shard_bytes=1000, keep_versions=2, grace_s=10), clock=clock)
    file = origin.add_file(b"never pruned")
    announce_versions(origin, 0, 1, 2)
    assert len(origin.store.held("manifests")) == 3
    clock.now += 11
    announce_versions(origin, 3)
    assert len(origin.store.held("manifests")) == 3
    assert origin.store.has("shards", file)
    assert origin.head is not None
    assert [entry.version for entry in origin.head.versions] == [2, 3]


def test_nothing_is_pruned_under_a_reader(tmp_path: Path) -> None:
    clock = Clock()
    origin = Origin(tmp_path, RUN_KEY, OriginSettings(keep_versions=1, grace_s=10), clock=clock, monotonic=clock)
    old = origin.stage(0, make_tensors()).manifest_digest
    origin.announce(ledger_head="")
    announce_versions(origin, 1)
    clock.now += 11
    origin.store.access.touch(old)
    announce_versions(origin, 2)
    assert origin.store.has("manifests", old)
    clock.now += 11
    announce_versions(origin, 3)
    assert not origin.store.has("manifests", old)


def test_head_is_signed_again_before_it_expires(tmp_path: Path) -> None:
    clock = Clock()
    origin = Origin(tmp_path, RUN_KEY, OriginSettings(head_ttl_s=100), clock=clock)
    announce_versions(origin, 0)
    origin.refresh()
    assert origin.head is not None
    assert origin.head.counter == 1
    clock.now += 60
    origin.refresh()
    assert origin.head.counter == 2
    assert origin.head.expires_at == clock.now + 100


def test_head_is_signed_again_while_a_long_stage_goes_on(tmp_path: Path) -> None:
    clock = Clock()
    origin = Origin(tmp_path, RUN_KEY, OriginSettings(head_ttl_s=100, shard_bytes=1000), clock=clock)
    announce_versions(origin, 0)
    put = origin.store.put
    refreshed: list[bool] = []

    def slow_put(folder: Folder, data: Bytes, digest: str | None = None) -> str:
        if folder == "manifests":
            clock.now += 60
            refresher = threading.Thread(target=origin.refresh, daemon=True)
            refresher.start()
            refresher.join(10)
            refreshed.append(not refresher.is_alive())
        return put(folder, data, digest)

    origin.store.put = slow_put  # type: ignore[method-assign]
    origin.stage(1, make_tensors(seed=1))
    assert refreshed == [True]
    assert origin.head is not None
    assert origin.head.counter == 2
    assert [entry.version for entry in origin.announce(ledger_head="").versions] == [0, 1]


BAD_TENSORS = {
    "too few bytes": (WireTensor("w", "bfloat16", (3,), b"12345"), "shape"),
    "unknown type": (WireTensor("w", "complex64", (1,), b"12345678"), "dtype"),
    "a space in the name": (WireTensor("a weight", "uint8", (1,), b"1"), "name is not allowed"),
    "no name": (WireTensor("", "uint8", (1,), b"1"), "name is not allowed"),
    "a long name": (WireTensor("w" * 256, "uint8", (1,), b"1"), "name is not allowed"),
    "a reserved name": (WireTensor("__metadata__", "uint8", (1,), b"1"), "reserved"),
    "the same name": (WireTensor("norm", "uint8", (1,), b"1"), "two tensors"),
    "many dimensions": (WireTensor("w", "uint8", (1,) * 9, b"1"), "shape is not allowed"),
    "every second byte": (WireTensor("w", "uint8", (2,), memoryview(b"1234")[::2]), "one piece"),
    "transposed": (WireTensor("w", "uint8", (3, 2), np.zeros((2, 3), np.uint8).T.data), "one piece"),
}


@pytest.mark.parametrize("bad", BAD_TENSORS)
def test_a_tensor_that_cannot_travel_is_refused_before_anything_is_written(bad: str, origin: Origin) -> None:
    tensor, reason = BAD_TENSORS[bad]
    with pytest.raises(TensorError, match=reason) as caught:
        origin.stage(0, [*make_tensors(), tensor])
    assert caught.value.hint
    assert not origin.store.held("shards")


def test_buffers_of_any_dimensions_travel(origin: Origin) -> None:
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensors = [
        WireTensor("scalar", "float32", (), np.array(1.5, np.float32).data),
        WireTensor("matrix", "float32", (2, 3), matrix.data),
        WireTensor("none", "float32", (0, 3), np.empty((0, 3), np.float32).data),
    ]
    digest = origin.stage(0, tensors).manifest_digest
    assert published_bytes(origin, digest) == np.array(1.5, np.float32).tobytes() + matrix.tobytes()


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[]", b'{"payload": 1}', b"[" * 100_000])
def test_a_damaged_head_says_what_to_do(damage: bytes, origin: Origin) -> None:
    announce_versions(origin, 0)
    (origin.root / "head.json").write_bytes(damage)
    with pytest.raises(IntegrityError, match=r"head\.json is damaged") as caught:
        Origin(origin.root, RUN_KEY)
    assert "from a relay" in caught.value.hint


def test_a_full_disk_ends_a_stage_in_one_sentence(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shoal.broadcast.store.write_atomic", full)
    with pytest.raises(DiskError, match="no space") as caught:
        origin.stage(0, make_tensors())
    assert caught.value.hint
