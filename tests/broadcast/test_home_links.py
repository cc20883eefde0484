"""65 GB over 50 Mbit/s, at a scale of one to a million: hours of a simulated clock, and versions published all the while."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.broadcast import DownloadProgress, Origin, OriginServer, OriginSettings, Relay, WeightClient, WireTensor
from shoal.broadcast.download import MirrorProgress, ProgressLine
from shoal.metrics import EventLog

from .conftest import RUN_KEY, Mirror
from .test_client import expected_weights, publish, weights_of
from .test_origin import Clock

MakeClient = Callable[..., WeightClient]
MakeMirror = Callable[..., Mirror]
MakeRelay = Callable[..., Relay]

MODEL_BYTES, SHARD_BYTES = 65_000, 325
BYTES_S = 50e6 / 8 / 1e6
VERSION_EVERY_S = 20 * 60
STALLED_S = 600.0


def tensors(version: int) -> list[WireTensor]:
    """Every version changes one byte of the one before."""
    data = bytearray(random.Random(0).randbytes(MODEL_BYTES))
    for place in range(version):
        data[100 * place] ^= 1
    return [WireTensor("w", "bfloat16", (MODEL_BYTES // 2,), bytes(data))]


@pytest.mark.parametrize("keyframe_every", [8, 2])
def test_a_model_that_takes_hours_arrives_while_versions_go_on(
    keyframe_every: int, tmp_path: Path, make_client: MakeClient
) -> None:
    """What is fetched once is never fetched again, although the version that was begun with left the head long ago: it is
    completed, and deltas lead from it to the newest."""
    clock, said = Clock(), list[str]()
    settings = OriginSettings(
        shard_bytes=SHARD_BYTES,
        keep_versions=4,
        keyframe_every=keyframe_every,
        delta_from_bytes=0,
        span_bytes=MODEL_BYTES,
    )
    origin = Origin(tmp_path / "origin", RUN_KEY, settings, clock=clock, monotonic=clock)
    server = OriginServer(origin.store, "127.0.0.1", 0)
    server.start()
    client = make_client(server.url, connections=1, monotonic=clock, clock=clock)
    version, received, done = 0, 0, 0
    estimates: list[tuple[float, float]] = []
    line = ProgressLine(said.append, clock=clock)

    def announce(number: int) -> None:
        origin.stage(number, tensors(number))
        origin.announce(ledger_head="")

    def arrived(progress: DownloadProgress) -> None:
        """Time passes as the link needs for what has arrived; the trainer publishes by the same clock."""
        nonlocal version, received, done
        if progress.bytes_done > done:
            clock.now += (progress.bytes_done - done) / BYTES_S
            received += progress.bytes_done - done
            estimates.append((clock.now, progress.left_s))
        done = progress.bytes_done
        while clock.now - started > (version + 1) * VERSION_EVERY_S:
            version += 1
            announce(version)
            client.head(newer_than=version, wait_s=10)
        origin.refresh()
        line(progress)

    announce(0)
    started = clock.now
    try:
        client.fetch_newest(deadline_s=STALLED_S, on_progress=arrived)
        hours = (clock.now - started) / 3600
        now, left_s = estimates[len(estimates) // 2]
        assert now + left_s == pytest.approx(clock.now, abs=60)
        newest, path = client.fetch_newest(deadline_s=STALLED_S, on_progress=arrived)
    finally:
        server.stop()
    assert newest.version == 8
    assert weights_of(path) == bytes(tensors(8)[0].data)
    assert 2.88 < hours < 2.90
    assert received < 1.05 * MODEL_BYTES
    assert len(said) > 100
    assert said[0].startswith("fetching version 0: 325 B of 65.0 kB (0%), 6 B/s, 2 h ")


def test_a_relay_says_how_far_it_is_and_how_long_the_rest_takes() -> None:
    clock, said = Clock(), list[str]()
    progress = MirrorProgress(said.append, clock=clock)
    progress.begin(7, {"found": 15_000_000_000, "a": 10_000_000_000, "b": 40_000_000_000})
    clock.now += 4
    progress.arrived("found", was_here=True)
    clock.now += 1596
    progress.arrived("a", was_here=False)
    clock.now += 4
    progress.arrived("nothing that was wanted", was_here=False)
    clock.now += 6396
    progress.arrived("b", was_here=False)
    assert said == [
        "fetching version 7: 15.0 GB of 65.0 GB (23%), 0 B/s",
        "fetching version 7: 25.0 GB of 65.0 GB (38%), 6.2 MB/s, 1 h 47 min left",
        "fetching version 7: 25.0 GB of 65.0 GB (38%), 6.2 MB/s, 1 h 47 min left",
        "fetching version 7: 65.0 GB of 65.0 GB (100%), 6.2 MB/s, checking it",
    ]


def test_a_version_that_passes_quickly_is_passed_in_silence() -> None:
    clock, said = Clock(), list[str]()
    progress = MirrorProgress(said.append, clock=clock)
    for version in range(3):
        clock.now += 600
        progress.begin(version, {"a": 1_000_000})
        clock.now += 2
        progress.arrived("a", was_here=False)
    assert said == []


def test_the_line_of_a_relay_reaches_its_operator(
    origin: Origin,
    make_mirror: MakeMirror,
    make_relay: MakeRelay,
    make_client: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.broadcast.download.PROGRESS_EVERY_S", 0.0)
    digest, said = publish(origin), list[str]()
    relay = make_relay(make_mirror().url, metrics=EventLog(), report=said.append)
    client = make_client(relay.url)
    client.head(newer_than=0, wait_s=20)
    assert weights_of(client.fetch_version(0, digest)) == expected_weights()
    assert any(line.startswith("fetching version 0: ") for line in said)
