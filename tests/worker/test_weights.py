"""Weights are followed in the background, from relays that may fail."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broadcast.conftest import RUN_KEY, make_tensors
from shoal.broadcast import DownloadProgress, Origin, OriginServer, OriginSettings, VersionEntry, WeightClient
from shoal.errors import UnavailableError
from shoal.worker import WeightFollower
from support.tiny_run import DiskWeights, Reports, version_digest

DEADLINE_S = 30.0


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    return Origin(tmp_path / "origin", RUN_KEY, OriginSettings(shard_bytes=4000))


@pytest.fixture
def client(tmp_path: Path, origin: Origin) -> Iterator[WeightClient]:
    server = OriginServer(origin.store, "127.0.0.1", 0)
    server.start()
    client = WeightClient(RUN_KEY.public, lambda: [server.url], tmp_path / "cache")
    yield client
    client.close()
    server.stop()


@pytest.fixture
def follow() -> Iterator[Callable[..., WeightFollower]]:
    followers: list[WeightFollower] = []

    def start(weights: object, keep_versions: int = 3, **options: object) -> WeightFollower:
        follower = WeightFollower(weights, keep_versions=keep_versions, **options)  # type: ignore[arg-type]
        followers.append(follower)
        follower.start()
        return follower

    yield start
    for follower in followers:
        follower.stop()


def after(version: int) -> Callable[[int, int], bool]:
    """What a rewind to this version voids."""
    return lambda epoch, number: epoch < 1 and number > version


def publish(origin: Origin, version: int) -> str:
    publication = origin.stage(version, make_tensors(version))
    origin.announce(ledger_head="0" * 64)
    return publication.manifest_digest


def test_the_first_version_is_waited_for_and_named_with_its_bytes(
    origin: Origin, client: WeightClient, follow: Callable[..., WeightFollower]
) -> None:
    follower = follow(client)
    assert follower.held() == []
    assert follower.newest() == -1
    digest = publish(origin, 0)
    first = follower.wait_for_any(DEADLINE_S)
    assert (first.version, first.manifest_digest) == (0, digest)
    assert (first.path / "model.safetensors").is_file()


def test_new_versions_arrive_by_themselves_and_old_ones_are_forgotten(
    origin: Origin, client: WeightClient, follow: Callable[..., WeightFollower]
) -> None:
    follower = follow(client, keep_versions=2)
    for version in range(4):
        publish(origin, version)
        follower.wait_newer(version - 1, DEADLINE_S)
        assert follower.newest() == version
    assert follower.held() == [2, 3]


def test_the_path_of_a_held_version_needs_no_fetch_and_another_is_fetched(
    origin: Origin, client: WeightClient, follow: Callable[..., WeightFollower]
) -> None:
    first = publish(origin, 0)
    second = publish(origin, 1)
    follower = follow(client)
    newest = follower.wait_for_any(DEADLINE_S)
    assert newest.version == 1
    assert follower.path(1, second, deadline_s=0.0) == newest.path
    assert (follower.path(0, first, deadline_s=DEADLINE_S) / "model.safetensors").is_file()
    assert follower.held() == [0, 1]


def test_a_relay_that_fails_is_reported_and_tried_again(
    follow: Callable[..., WeightFollower], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.worker.weights.RETRY_S", 0.001)
    reports = Reports()
    weights = DiskWeights({0: tmp_path})
    follower = follow(weights, report=reports)
    weights.published.append(0)
    assert follower.wait_for_any(DEADLINE_S).path == tmp_path
    assert follower.path(0, version_digest(0), deadline_s=1.0) == tmp_path


def test_a_full_disk_is_reported_and_survived(
    follow: Callable[..., WeightFollower], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.worker.weights.RETRY_S", 0.001)

    class FullOnce(DiskWeights):
        def fetch_version(self, version: int, manifest_digest: str, **options: Any) -> Path:
            if not self.fetched:
                self.fetched.append(-1)
                raise OSError(28, "No space left on device")
            return super().fetch_version(version, manifest_digest, **options)

    reports = Reports()
    follower = follow(FullOnce({0: tmp_path}, [0]), report=reports)
    assert follower.wait_for_any(DEADLINE_S).version == 0
    assert reports.some("No space left on device")


def test_without_versions_the_wait_ends_with_a_sentence(follow: Callable[..., WeightFollower]) -> None:
    follower = follow(DiskWeights({}))
    with pytest.raises(UnavailableError, match="No relay delivered a policy version within 0 s"):
        follower.wait_for_any(0.01)


def test_the_first_version_is_waited_for_as_long_as_bytes_of_it_arrive(
    follow: Callable[..., WeightFollower], tmp_path: Path
) -> None:
    class SlowWeights(DiskWeights):
        def fetch_newest(self, **options: Any) -> tuple[VersionEntry, Path]:
            for done in range(60):
                options["on_progress"](DownloadProgress(0, 100, bytes_done=done))
                threading.Event().wait(0.02)
            return super().fetch_newest(**options)

    assert follow(SlowWeights({0: tmp_path}, [0])).wait_for_any(0.9).version == 0


def test_stop_ends_every_wait(follow: Callable[..., WeightFollower]) -> None:
    follower = follow(DiskWeights({}))
    threading.Timer(0.005, follower.stop).start()
    with pytest.raises(UnavailableError):
        follower.wait_for_any(DEADLINE_S)
    follower.wait_newer(5, DEADLINE_S)


def test_nothing_is_fetched_once_stop_has_returned(follow: Callable[..., WeightFollower], tmp_path: Path) -> None:
    fetching = threading.Event()
    ended: list[str] = []

    class Slow(DiskWeights):
        def fetch_version(self, version: int, manifest_digest: str, **options: Any) -> Path:
            fetching.set()
            while not self.closed:
                pass
            ended.append("fetch")
            raise UnavailableError("Stopped.")

    follower = follow(Slow({0: tmp_path}, [0]))
    assert fetching.wait(DEADLINE_S)
    follower.stop()
    assert ended == ["fetch"]


def test_versions_that_the_owner_withdrew_are_held_no_longer(tmp_path: Path) -> None:
    weights = DiskWeights({0: tmp_path, 1: tmp_path}, [0, 1])
    follower = WeightFollower(weights, keep_versions=3)  # type: ignore[arg-type]
    follower._take(weights.head())
    follower.path(0, version_digest(0), deadline_s=1.0)
    assert follower.held() == [0, 1]
    weights.published = [0]
    follower._take(weights.head())
    assert follower.held() == [0]
    assert follower.newest_held() == (0, version_digest(0))


def test_after_a_rewind_the_same_numbers_mean_other_weights(
    origin: Origin, client: WeightClient, follow: Callable[..., WeightFollower]
) -> None:
    """A worker that was away during the rewind, and returns when the new epoch has passed its versions."""
    old = [publish(origin, version) for version in range(4)]
    follower = WeightFollower(client, keep_versions=4)
    follower._take(client.head())
    follower.path(2, old[2], deadline_s=DEADLINE_S)
    follower.path(1, old[1], deadline_s=DEADLINE_S)
    assert follower.held() == [1, 2, 3]
    origin.take_up(1, after(1), ledger_head="")
    new = {}
    for version in range(2, 6):
        new[version] = origin.stage(version, make_tensors(10 + version)).manifest_digest
        origin.announce(ledger_head="0" * 64)
    follower._take(client.head())
    assert follower.held() == [1, 5]
    assert follower.newest_held() == (5, new[5])
    follower.path(2, new[2], deadline_s=DEADLINE_S)
    assert follower.held() == [1, 2, 5]


def test_a_relay_that_serves_the_old_head_after_a_rewind_is_overruled(
    origin: Origin, client: WeightClient, tmp_path: Path
) -> None:
    for version in range(3):
        publish(origin, version)
    stale = tmp_path / "stale"
    shutil.copytree(origin.root, stale)
    origin.take_up(1, after(0), ledger_head="")
    new = client.head()
    assert (new.epoch, [entry.version for entry in new.versions]) == (1, [0])
    server = OriginServer(Origin(stale, RUN_KEY, OriginSettings(shard_bytes=4000)).store, "127.0.0.1", 0)
    server.start()
    try:
        only_stale = WeightClient(RUN_KEY.public, lambda: [server.url], tmp_path / "cache")
        assert only_stale.head(newer_than=None).counter == new.counter, "what was seen is kept over a restart"
        only_stale.close()
    finally:
        server.stop()


class SlowWeights(DiskWeights):
    """A version of five shards; the machine begins to rest behind the second one, and only a second fetch gets them all."""

    def __init__(self, versions: dict[int, Path]) -> None:
        super().__init__(versions, [0])
        self.shards: list[int] = []
        self.rest: Callable[[], None] = lambda: None

    def fetch_newest(
        self, *, deadline_s: float = 600, on_progress: Callable[[DownloadProgress], None] | None = None
    ) -> tuple[VersionEntry, Path]:
        assert on_progress is not None
        for shard in range(5):
            self.shards.append(shard)
            if len(self.shards) == 2:
                self.rest()
            on_progress(DownloadProgress(0, 500, bytes_done=100 * shard))
        return super().fetch_newest(deadline_s=deadline_s, on_progress=on_progress)


def test_a_rest_ends_a_fetch_behind_its_shard_and_work_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.worker.weights.RETRY_S", 0.001)
    monkeypatch.setattr("shoal.worker.weights.LISTEN_S", 0.001)
    weights, said = SlowWeights({0: tmp_path}), Reports()
    follower = WeightFollower(weights, keep_versions=3, report=said)  # type: ignore[arg-type]
    weights.rest = lambda: follower.hold(True)
    listened = 0

    def listen() -> None:
        nonlocal listened
        listened += 1
        if weights.shards == [0, 1] and listened > 20:
            follower.hold(False)

    follower.start()
    try:
        held = follower.wait_for_any(DEADLINE_S, listen=listen)
    finally:
        follower.stop()
    assert held.version == 0
    assert weights.shards == [0, 1, 0, 1, 2, 3, 4]
    assert said == [], "a rest is no failure"


def test_time_spent_resting_does_not_count_as_relays_that_deliver_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.worker.weights.LISTEN_S", 0.001)
    follower = WeightFollower(DiskWeights({}), keep_versions=3)  # type: ignore[arg-type]
    follower.hold(True)
    listened = 0

    def listen() -> None:
        nonlocal listened
        listened += 1
        if listened == 50:
            follower.hold(False)

    with pytest.raises(UnavailableError, match="No relay delivered"):
        follower.wait_for_any(0.01, listen=listen)
    assert listened > 50
