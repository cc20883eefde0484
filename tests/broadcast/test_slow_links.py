"""Links slower than any fixed deadline: versions arrive, nothing verified is fetched twice, nothing abandoned stays on disk."""

import http.server
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.broadcast import DownloadProgress, Origin, OriginSettings, WeightClient, WireTensor
from shoal.errors import UnavailableError

from .conftest import RUN_KEY, Behaviour, Mirror, SlowClock, make_tensors
from .test_client import expected_weights, publish, weights_of

Handler = http.server.BaseHTTPRequestHandler
MakeClient = Callable[..., WeightClient]
MakeMirror = Callable[..., Mirror]


def slow(origin: Origin, clock: SlowClock, seconds: float) -> Behaviour:
    """Sends each shard in pieces of 200 bytes, with time between them."""

    def behave(handler: Handler, path: str) -> bool:
        if not path.startswith("/shards/"):
            return False
        data = (origin.root / path.strip("/")).read_bytes()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        try:
            for at in range(0, len(data), 200):
                clock.send(handler.wfile.write, data[at : at + 200], seconds)
        except OSError:
            handler.close_connection = True
        return True

    return behave


def test_a_fetch_goes_on_as_long_as_shards_arrive(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient
) -> None:
    digest, clock = publish(origin), SlowClock()
    client = make_client(make_mirror(slow(origin, clock, 1.0)).url, connections=1, monotonic=clock)
    started = clock.now
    assert weights_of(client.fetch_version(0, digest, deadline_s=20)) == expected_weights()
    assert clock.now - started > 20


def test_a_link_slower_than_what_is_usually_asked_of_a_relay_still_delivers(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient
) -> None:
    digest, clock = publish(origin), SlowClock()
    mirror = make_mirror(slow(origin, clock, 0.3))  # 1000 bytes in 1.5 s, where one second is allowed
    client = make_client(mirror.url, connections=1, monotonic=clock, answer_within_s=1.0)
    assert weights_of(client.fetch_version(0, digest, deadline_s=200)) == expected_weights()


def test_a_silent_link_still_ends_at_its_deadline(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient
) -> None:
    digest, clock = publish(origin), SlowClock()

    def silent(handler: Handler, path: str) -> bool:
        if path.startswith("/shards/"):
            clock.now += 30
            handler.close_connection = True
            return True
        return False

    client = make_client(make_mirror(silent).url, monotonic=clock)
    with pytest.raises(UnavailableError, match="No relay delivered"):
        client.fetch_version(0, digest, deadline_s=100)


def test_a_limit_in_all_ends_a_fetch_that_makes_progress(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient
) -> None:
    digest, clock = publish(origin), SlowClock()
    client = make_client(make_mirror(slow(origin, clock, 1.0)).url, connections=1, monotonic=clock)
    with pytest.raises(UnavailableError):
        client.fetch_version(0, digest, deadline_s=20, within_s=20)


def dies_after(count: int) -> Behaviour:
    shards = 0

    def behave(handler: Handler, path: str) -> bool:
        nonlocal shards
        shards += path.startswith("/shards/")
        handler.close_connection = path.startswith("/shards/") and shards > count
        return handler.close_connection

    return behave


def staged_copies(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "client").glob("*/staging/*"))


def test_abandoned_copies_do_not_pile_up(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient, tmp_path: Path
) -> None:
    mirror = make_mirror()
    client = make_client(mirror.url, connections=1)
    for version in range(5):
        digest = publish(origin, version)
        mirror.behaviour = dies_after(2)
        with pytest.raises(UnavailableError):
            client.fetch_version(version, digest, deadline_s=0.3)
        assert len(staged_copies(tmp_path)) == 1
    mirror.behaviour = lambda handler, path: False
    assert weights_of(client.fetch_version(4, digest)) == expected_weights(4)
    assert staged_copies(tmp_path) == []


def flipped(tensor: WireTensor) -> WireTensor:
    """The same but for one bit."""
    data = bytearray(tensor.data)
    data[:1] = bytes(byte ^ 1 for byte in data[:1])
    return WireTensor(tensor.name, tensor.dtype, tensor.shape, bytes(data))


def test_what_is_staged_counts_in_the_plan_and_in_its_price(
    tmp_path: Path, make_mirror: MakeMirror, make_client: MakeClient
) -> None:
    """Most of version 0 is here when version 1 appears: the rest of 0 and a delta cost less than 1 in full."""
    settings = OriginSettings(shard_bytes=1000, delta_from_bytes=0, keyframe_every=1)
    origin = Origin(tmp_path / "origin", RUN_KEY, settings)
    first = publish(origin)
    mirror = make_mirror(dies_after(10), root=origin.root)
    client = make_client(mirror.url, connections=1)
    with pytest.raises(UnavailableError):
        client.fetch_version(0, first, deadline_s=0.3)
    before = client.preview()
    assert before is not None
    assert before.fetch_bytes == len(expected_weights()) - 10_000
    changed = [flipped(tensor) for tensor in make_tensors()]
    second = origin.stage(1, changed).manifest_digest
    origin.announce(ledger_head="")
    mirror.behaviour, mirror.requests = (lambda handler, path: False), []
    progress: list[DownloadProgress] = []
    path = client.fetch_version(1, second, on_progress=progress.append)
    assert weights_of(path) == b"".join(bytes(tensor.data) for tensor in changed)
    assert len([request for request in mirror.requests if request.startswith("/shards/")]) < 6
    assert progress[-1].bytes_left == 0


def test_a_version_that_does_not_fit_holds_neither_files_nor_space(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, client = publish(origin), make_client(make_mirror().url)
    client.head()

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UnavailableError, match="no space"):
        client.fetch_version(0, digest)
    handles = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(UnavailableError, match="no space"):
            client.fetch_version(0, digest)
    assert len(os.listdir("/proc/self/fd")) < handles + 10
    assert staged_copies(tmp_path) == []
