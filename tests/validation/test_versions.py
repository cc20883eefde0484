"""Versions arrive beside the work that does not need them."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.broadcast.download import DownloadProgress
from shoal.errors import UnavailableError
from shoal.protocol import api
from shoal.validation.versions import HeldVersions

PATIENCE_S = 30


class SlowWeights:
    """A WeightClient whose fetches wait to be let go."""

    def __init__(self, root: Path) -> None:
        self.root, self.fetched, self.deadlines = root, list[int](), list[float]()
        self.go, self.failing, self.breaking = threading.Event(), set[int](), set[int]()

    def fetch_version(self, version: int, manifest_digest: str, *, deadline_s: float, on_progress: object) -> Path:
        self.fetched.append(version)
        self.deadlines.append(deadline_s)
        assert self.go.wait(PATIENCE_S)
        if version in self.failing:
            raise UnavailableError(f"No relay delivered version {version}.")
        if version in self.breaking:
            raise OSError("the disk is gone")
        on_progress(DownloadProgress(version, 10, bytes_done=10))  # type: ignore[operator]
        path = self.root / manifest_digest
        path.mkdir(exist_ok=True)
        return path


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[SlowWeights]:
    made = SlowWeights(tmp_path)
    yield made
    made.go.set()


def wanted(*versions: int) -> list[api.WantedVersion]:
    return [api.WantedVersion(version=version, manifest_digest=digest(version)) for version in versions]


def digest(version: int) -> str:
    return f"{version:064x}"


def held(weights: SlowWeights) -> HeldVersions:
    return HeldVersions(weights)  # type: ignore[arg-type]


def settle(versions: HeldVersions) -> None:
    """Until nothing is fetched any more."""
    for _ in range(PATIENCE_S * 100):
        if not versions.fetching():
            return
        threading.Event().wait(0.01)
    raise AssertionError("a fetch does not end")


def test_nobody_waits_for_a_version_that_is_being_fetched(weights: SlowWeights) -> None:
    versions = held(weights)
    versions.want(wanted(1))
    assert (versions.ready(), versions.fetching()) == ([], [digest(1)])
    weights.go.set()
    settle(versions)
    assert versions.ready() == [digest(1)]
    assert versions.path(1, digest(1)) == weights.root / digest(1)
    assert weights.fetched == [1]


def test_the_time_of_a_fetch_is_its_own_and_not_that_of_the_one_before(weights: SlowWeights) -> None:
    now = 100.0
    versions = HeldVersions(weights, clock=lambda: now)  # type: ignore[arg-type]
    versions.want(wanted(1))
    assert versions.fetching_s() == 0.0
    now = 107.0
    assert versions.fetching_s() == 7.0
    weights.go.set()
    settle(versions)
    weights.go.clear()
    now = 200.0
    versions.want(wanted(2))
    assert versions.fetching_s() == 0.0


def test_a_version_is_fetched_once_however_often_it_is_wanted(weights: SlowWeights) -> None:
    versions = held(weights)
    for _ in range(3):
        versions.want(wanted(1, 2))
    weights.go.set()
    settle(versions)
    versions.want(wanted(1, 2))
    settle(versions)
    assert weights.fetched == [1, 2]


def test_a_failure_is_reported_once_and_then_the_version_is_tried_again(weights: SlowWeights) -> None:
    versions = held(weights)
    weights.failing = {1}
    weights.go.set()
    versions.want(wanted(1))
    settle(versions)
    assert versions.ready() == [digest(1)], "a file that needs it is claimed, so that the coordinator hears of it"
    with pytest.raises(UnavailableError, match="No relay delivered version 1"):
        versions.path(1, digest(1))
    assert versions.ready() == []
    weights.failing = set()
    versions.want(wanted(1))
    settle(versions)
    assert versions.path(1, digest(1)).exists()


def test_a_fetch_that_breaks_is_reported_like_one_that_fails_and_the_next_versions_arrive(weights: SlowWeights) -> None:
    versions = held(weights)
    weights.breaking = {1}
    weights.go.set()
    versions.want(wanted(1, 2))
    settle(versions)
    assert versions.path(2, digest(2)).exists()
    with pytest.raises(UnavailableError, match="Version 1 cannot be had: OSError: the disk is gone"):
        versions.path(1, digest(1))
    weights.breaking = set()
    versions.want(wanted(1))
    settle(versions)
    assert versions.path(1, digest(1)).exists()


def test_a_fetch_that_said_how_far_it_is_says_when_it_is_done(
    weights: SlowWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = list[str]()
    weights.go.set()
    HeldVersions(weights, heard.append).path(1, digest(1))  # type: ignore[arg-type]
    assert heard == [], "a fast one passes in silence"
    monkeypatch.setattr("shoal.broadcast.download.PROGRESS_EVERY_S", 0.0)
    HeldVersions(weights, heard.append).path(2, digest(2))  # type: ignore[arg-type]
    assert heard[0].startswith("fetching version 2")
    assert heard[-1] == "has version 2 of the policy"


def test_a_version_that_was_deleted_is_no_longer_ready(weights: SlowWeights) -> None:
    versions = held(weights)
    weights.go.set()
    versions.want(wanted(1))
    settle(versions)
    (weights.root / digest(1)).rmdir()
    assert versions.ready() == []
    versions.want(wanted(1))
    settle(versions)
    assert weights.fetched == [1, 1]


def test_only_silence_ends_a_fetch(weights: SlowWeights) -> None:
    versions = held(weights)
    weights.go.set()
    versions.path(3, digest(3))
    assert weights.deadlines == [60.0], "this deadline of the client starts again with every byte"


def test_a_version_in_use_is_the_last_to_be_deleted(weights: SlowWeights) -> None:
    import os

    versions = held(weights)
    weights.go.set()
    versions.path(1, digest(1))
    os.utime(weights.root / digest(1), (1.0, 1.0))
    versions.path(1, digest(1))
    assert (weights.root / digest(1)).stat().st_mtime > 1e9


def test_the_newest_version_comes_behind_those_that_files_wait_for(weights: SlowWeights) -> None:
    versions = held(weights)
    versions.want(wanted(1, 2))
    versions.expect(*wanted(3))
    assert versions.fetching() == [digest(1), digest(2), digest(3)]
    assert versions.wanted() == [digest(1), digest(2)]
    weights.go.set()
    settle(versions)
    assert weights.fetched == [1, 2, 3]
    assert versions.ready() == [digest(1), digest(2), digest(3)]


def test_a_version_that_is_superseded_before_its_turn_is_not_fetched(weights: SlowWeights) -> None:
    versions = held(weights)
    versions.want(wanted(1))
    versions.expect(*wanted(2))
    versions.expect(*wanted(3))
    versions.expect(None)
    assert versions.newest == digest(3)
    weights.go.set()
    settle(versions)
    assert weights.fetched == [1, 3]


def test_an_expected_version_that_could_not_be_had_holds_no_file_back(weights: SlowWeights) -> None:
    versions = held(weights)
    weights.failing = {1}
    weights.go.set()
    versions.expect(*wanted(1))
    settle(versions)
    assert versions.ready() == [], "no file needs it, so there is nothing to report"
    assert versions.newest == digest(1)
    weights.failing = set()
    versions.want(wanted(1))
    settle(versions)
    assert versions.path(1, digest(1)).exists()
    assert weights.fetched == [1, 1]
