"""Deltas from the publisher through relays to a client's disk."""

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from shoal.broadcast import Origin, OriginServer, OriginSettings, Relay, WeightClient, WireTensor
from shoal.broadcast.manifest import open_manifest
from shoal.broadcast.staging import StagedWeights
from shoal.metrics import EventLog

from .conftest import RUN_KEY, Mirror
from .test_client import weights_of

MakeClient = Callable[..., WeightClient]


def version_tensors(version: int) -> list[WireTensor]:
    """Weights of which each version changes a few numbers of the one before."""
    data = bytearray(random.Random(0).randbytes(20_000))
    for number in range(1, version + 1):
        rng = random.Random(number)
        for _ in range(30):
            data[rng.randrange(len(data))] ^= 1
    half = len(data) // 2
    return [
        WireTensor("a", "bfloat16", (half // 2,), bytes(data[:half])),
        WireTensor("b", "float32", (half // 40, 10), memoryview(bytes(data[half:]))),
    ]


def version_bytes(version: int) -> bytes:
    return b"".join(bytes(tensor.data) for tensor in version_tensors(version))


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    return new_origin(tmp_path / "origin")


def new_origin(root: Path, remember_bytes: int = 0) -> Origin:
    """One that reads the base of a delta from its shards, as for a large model."""
    settings = OriginSettings(
        shard_bytes=1000,
        keyframe_every=4,
        delta_from_bytes=0,
        span_bytes=3000,
        keep_versions=3,
        grace_s=0,
        remember_bytes=remember_bytes,
    )
    return Origin(root, RUN_KEY, settings)


def publish(origin: Origin, version: int) -> str:
    digest = origin.stage(version, version_tensors(version)).manifest_digest
    origin.announce(ledger_head="")
    return digest


def kinds(origin: Origin, digest: str) -> list[str]:
    return [
        encoding.kind for encoding in open_manifest(origin.store.read("manifests", digest), RUN_KEY.public).encodings
    ]


def test_keyframes_appear_every_few_versions(origin: Origin) -> None:
    published = [kinds(origin, publish(origin, version)) for version in range(6)]
    assert published == [["full"], ["delta"], ["delta"], ["delta"], ["full", "delta"], ["delta"]]


def test_follower_fetches_only_changes(origin: Origin, origin_server: OriginServer, make_client: MakeClient) -> None:
    metrics = EventLog()
    client = make_client(origin_server.url, metrics=metrics)
    client.fetch_version(0, publish(origin, 0))
    for version in range(1, 6):
        before = metrics.counters["bytes_received"]
        directory = client.fetch_version(version, publish(origin, version))
        assert weights_of(directory) == version_bytes(version)
        assert metrics.counters["bytes_received"] - before < 6000


def test_late_joiner_rebuilds_from_the_keyframe(
    origin: Origin, origin_server: OriginServer, make_relay: Callable[..., Relay], make_client: MakeClient
) -> None:
    digests = [publish(origin, version) for version in range(4)]
    client = make_client(make_relay(origin_server.url).url)
    client.head(newer_than=0, wait_s=20)
    assert weights_of(client.fetch_version(3, digests[3])) == version_bytes(3)


def test_every_announced_version_stays_reconstructible(
    origin: Origin, origin_server: OriginServer, make_client: MakeClient
) -> None:
    for version in range(7):
        publish(origin, version)
        assert origin.head is not None
        for entry in origin.head.versions:
            client = make_client(origin_server.url, name=f"client-{version}-{entry.version}")
            directory = client.fetch_version(entry.version, entry.manifest_digest)
            assert weights_of(directory) == version_bytes(entry.version)


def test_restarted_origin_goes_on_with_deltas(origin: Origin) -> None:
    publish(origin, 0)
    again = new_origin(origin.root)
    assert kinds(again, publish(again, 1)) == ["delta"]


def test_a_version_whose_shards_were_damaged_before_a_restart_is_no_base(origin: Origin) -> None:
    publish(origin, 0)
    publish(origin, 1)
    shard = sorted((origin.root / "shards").iterdir())[0]
    shard.write_bytes(bytes(shard.stat().st_size))
    again = new_origin(origin.root)
    assert kinds(again, publish(again, 2)) == ["full"]


def test_a_remembered_base_gives_the_same_deltas(tmp_path: Path) -> None:
    from_shards, from_memory = new_origin(tmp_path / "shards"), new_origin(tmp_path / "memory", remember_bytes=20_000)
    for version in range(7):
        assert publish(from_shards, version) == publish(from_memory, version)
        if version == 4:
            from_memory = new_origin(tmp_path / "memory", remember_bytes=20_000)


def test_a_stage_that_failed_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It overwrote a part of what was remembered: the next base is read from the shards."""
    expected, origin = new_origin(tmp_path / "expected"), new_origin(tmp_path / "origin", remember_bytes=20_000)
    for version in range(2):
        assert publish(expected, version) == publish(origin, version)
    with monkeypatch.context() as failing:
        failing.setattr(origin, "_sign", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            origin.stage(2, version_tensors(6))
    assert publish(expected, 2) == publish(origin, 2)


def test_a_version_that_is_staged_again_with_other_weights_has_the_right_base(tmp_path: Path) -> None:
    expected, origin = new_origin(tmp_path / "expected"), new_origin(tmp_path / "origin", remember_bytes=20_000)
    publish(expected, 0)
    publish(origin, 0)
    origin.stage(1, version_tensors(6))
    assert publish(expected, 1) == publish(origin, 1)


def test_a_delta_writes_nothing_but_itself(origin: Origin) -> None:
    """No copy of the base is kept: it is read from the shards that are served."""
    publish(origin, 0)
    publish(origin, 1)
    before = {path: path.stat().st_mtime_ns for path in origin.root.rglob("*") if path.is_file()}
    publication = origin.stage(2, version_tensors(2))
    written = [path for path in origin.root.rglob("*") if path.is_file() and path not in before]
    shards = [path for path in written if path.parent.name == "shards"]
    assert sum(path.stat().st_size for path in shards) == publication.follow_bytes < 6000
    assert {path.parent.name for path in written} == {"shards", "manifests"}
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


@pytest.mark.parametrize("change", ["appears", "vanishes", "type", "shape", "order"])
def test_other_tensors_than_those_of_the_base_travel_in_full(
    change: str, origin: Origin, origin_server: OriginServer, make_client: MakeClient
) -> None:
    publish(origin, 0)
    first, second = version_tensors(0)
    tensors = {
        "appears": [first, second, WireTensor("c", "int64", (), bytes(8))],
        "vanishes": [first],
        "type": [WireTensor("a", "float16", first.shape, first.data), second],
        "shape": [WireTensor("a", "bfloat16", (1, *first.shape), first.data), second],
        "order": [second, first],
    }[change]
    publication = origin.stage(1, tensors)
    origin.announce(ledger_head="")
    assert kinds(origin, publication.manifest_digest) == ["full"]
    directory = make_client(origin_server.url).fetch_version(1, publication.manifest_digest)
    assert weights_of(directory) == b"".join(bytes(tensor.data) for tensor in tensors)


def test_integers_travel_bit_for_bit_through_full_and_delta(
    origin: Origin, origin_server: OriginServer, make_client: MakeClient
) -> None:
    numbers = np.array([100_003, -1, 2**62 + 1, 0], np.int64)
    flags = np.array([True, False, True])
    client = make_client(origin_server.url)
    for version in range(3):
        numbers[3] = version
        tensors = [
            *version_tensors(version),
            WireTensor("flags", "bool", (3,), flags.data),
            WireTensor("count", "int64", (), np.array(100_003 + version).data),
            WireTensor("numbers", "int64", (2, 2), numbers.reshape(2, 2).data),
        ]
        publication = origin.stage(version, tensors)
        origin.announce(ledger_head="")
        assert publication.kind == ("full" if version == 0 else "delta")
        directory = client.fetch_version(version, publication.manifest_digest)
        with safe_open(directory / "model.safetensors", "numpy") as file:
            assert file.get_tensor("count").item() == 100_003 + version
            assert file.get_tensor("numbers").tolist() == numbers.reshape(2, 2).tolist()
            assert file.get_tensor("flags").tolist() == [True, False, True]


def test_a_long_chain_never_has_more_than_two_copies_on_disk(
    origin: Origin,
    origin_server: OriginServer,
    make_client: MakeClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digests = [publish(origin, version) for version in range(4)]
    counts: list[int] = []
    finish = StagedWeights.finish

    def counted(staged: StagedWeights, target: Path, on_tensor: Callable[[], None]) -> None:
        finish(staged, target, on_tensor)
        counts.append(len(list(target.parent.iterdir())))

    monkeypatch.setattr(StagedWeights, "finish", counted)
    directory = make_client(origin_server.url).fetch_version(3, digests[3])
    assert weights_of(directory) == version_bytes(3)
    assert counts == [1, 2, 2, 2]


def test_version_that_was_staged_but_never_announced_is_no_base(origin: Origin) -> None:
    publish(origin, 0)
    origin.stage(1, version_tensors(5))
    digest = publish(origin, 1)
    encoding = open_manifest(origin.store.read("manifests", digest), RUN_KEY.public).encoding("delta")
    assert encoding is not None
    assert encoding.base is not None
    assert encoding.base.version == 0


def test_versions_staged_together_chain(origin: Origin, origin_server: OriginServer, make_client: MakeClient) -> None:
    publish(origin, 0)
    origin.stage(1, version_tensors(1))
    digest = publish(origin, 2)
    client = make_client(origin_server.url)
    assert weights_of(client.fetch_version(2, digest)) == version_bytes(2)


def test_dense_update_travels_in_full(origin: Origin) -> None:
    publish(origin, 0)
    other = [
        WireTensor(tensor.name, tensor.dtype, tensor.shape, random.Random(9).randbytes(10_000))
        for tensor in version_tensors(0)
    ]
    publication = origin.stage(1, other)
    assert publication.kind == "full"
    assert kinds(origin, publication.manifest_digest) == ["full"]


def test_damaged_base_is_noticed_and_fetched_again(
    origin: Origin, make_mirror: Callable[..., Mirror], make_client: MakeClient
) -> None:
    first = publish(origin, 0)
    mirror = make_mirror()
    directory = make_client(mirror.url).fetch_version(0, first)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2] + b"??")
    again = make_client(mirror.url)
    assert weights_of(again.fetch_version(1, publish(origin, 1))) == version_bytes(1)


def test_base_damaged_while_the_client_runs_is_replaced(
    origin: Origin, origin_server: OriginServer, make_client: MakeClient
) -> None:
    client = make_client(origin_server.url)
    directory = client.fetch_version(0, publish(origin, 0))
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2] + b"??")
    assert weights_of(client.fetch_version(1, publish(origin, 1))) == version_bytes(1)


def zeros_the_tensors(file: Path) -> None:
    data = file.read_bytes()
    at = 8 + int.from_bytes(data[:8], "little")
    file.write_bytes(data[:at] + bytes(len(data) - at))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "its first tensor": lambda file: flip(file, 8 + int.from_bytes(file.read_bytes()[:8], "little"), 9000),
    "every byte": zeros_the_tensors,
    "its last bytes": lambda file: flip(file, -200, 200),
    "its header": lambda file: flip(file, 10, 20),
    "it is cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "it is empty": lambda file: os.truncate(file, 0),
    "it is longer": lambda file: os.truncate(file, file.stat().st_size + 4096),
    "it is gone": lambda file: file.unlink(),
}


def flip(file: Path, at: int, count: int) -> None:
    data = bytearray(file.read_bytes())
    at %= len(data)
    data[at : at + count] = bytes(byte ^ 0xFF for byte in data[at : at + count])
    file.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_base_that_is_damaged_in_any_way_is_replaced(
    damage: str, origin: Origin, origin_server: OriginServer, make_client: MakeClient
) -> None:
    client = make_client(origin_server.url)
    directory = client.fetch_version(0, publish(origin, 0))
    DAMAGES[damage](directory / "model.safetensors")
    second = publish(origin, 1)
    result: list[Path] = []
    fetch = threading.Thread(target=lambda: result.append(client.fetch_version(1, second)), daemon=True)
    fetch.start()
    fetch.join(60)
    assert [weights_of(path) for path in result] == [version_bytes(1)]


def test_an_error_in_an_apply_ends_the_fetch_and_the_next_one_fetches_nothing_twice(
    origin: Origin,
    make_mirror: Callable[..., Mirror],
    make_client: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mirror = make_mirror()
    client = make_client(mirror.url)
    client.fetch_version(0, publish(origin, 0))
    second = publish(origin, 1)
    handles = len(os.listdir("/proc/self/fd"))

    def fails(*arguments: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr("shoal.broadcast.codec.blocks.BlockDelta.apply", fails)
    with pytest.raises(MemoryError, match="no more"):
        client.fetch_version(1, second)
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) <= handles + 4
    mirror.requests.clear()
    assert weights_of(client.fetch_version(1, second)) == version_bytes(1)
    assert not [path for path in mirror.requests if path.startswith("/shards/")]
