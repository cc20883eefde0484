"""Follows the published versions in the background: new weights are fetched and verified while the old ones generate.

`held()` is what the worker may honestly claim to have. A version is on disk before it is named, and stays there as long as the
asynchrony window can ask for it.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.broadcast import DownloadProgress, Head, WeightClient
from shoal.broadcast.download import OnProgress, ProgressLine
from shoal.errors import ShoalError, UnavailableError
from shoal.metrics import EventLog, Report, silent

LONG_POLL_S = 15.0
RETRY_S = 1.0
STOP_DEADLINE_S = 5.0
FETCH_DEADLINE_S = 600.0
LISTEN_S = 0.5


class _RestingError(Exception):
    """Ends a fetch between two shards; what has arrived stays on disk."""


@dataclass(frozen=True)
class HeldVersion:
    version: int
    manifest_digest: str
    path: Path
    ready_at: float
    """When it was verified and could have been swapped in, by the monotonic clock."""


class WeightFollower:
    def __init__(
        self,
        weights: WeightClient,
        *,
        keep_versions: int,
        metrics: EventLog | None = None,
        report: Report = silent,
    ) -> None:
        self._weights, self._keep, self._report = weights, keep_versions, report
        self._metrics = metrics or EventLog()
        self._versions: dict[int, HeldVersion] = {}
        self._progress_at = 0.0
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._is_held = False
        self.link_bytes_per_s = 0.0
        """As fast as bytes came in lately; 0 before anything had to be fetched."""
        self._thread = threading.Thread(target=self._follow, name="weight-follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._weights.close()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(STOP_DEADLINE_S)  # else the interpreter may end under a fetch

    def hold(self, is_held: bool) -> None:
        """Fetches nothing further while the worker rests: neither its link nor its cores are free."""
        self._is_held = is_held

    def held(self) -> list[int]:
        with self._changed:
            return sorted(self._versions)

    def newest(self) -> int:
        return max(self.held(), default=-1)

    def newest_held(self) -> tuple[int, str] | None:
        """Number and manifest digest of the newest version."""
        with self._changed:
            if not self._versions:
                return None
            newest = self._versions[max(self._versions)]
        return newest.version, newest.manifest_digest

    def path(self, version: int, manifest_digest: str, *, deadline_s: float) -> Path:
        """The directory of a version that a lease names; fetched now if the follower does not hold it."""
        with self._changed:
            held = self._versions.get(version)
        if held is not None and held.manifest_digest == manifest_digest and held.path.exists():
            return held.path
        return self._fetch(version, manifest_digest, deadline_s)

    def ready_at(self, version: int) -> float | None:
        """When a held version could have been swapped in, by the monotonic clock."""
        with self._changed:
            held = self._versions.get(version)
        return held.ready_at if held is not None else None

    def wait_for_any(self, deadline_s: float, *, listen: Callable[[], None] = lambda: None) -> HeldVersion:
        """The newest version held, as soon as there is one; fails when no byte of one has arrived for `deadline_s`, rests
        apart. `listen` is called all the while and may end it."""
        self._progress_at = time.monotonic()
        while not self.held() and not self._stopping.is_set():
            listen()
            now = time.monotonic()
            self._progress_at = now if self._is_held else self._progress_at
            left_s = self._progress_at + deadline_s - now
            if left_s <= 0:
                break
            self.wait_newer(-1, min(left_s, LISTEN_S))
        with self._changed:
            if not self._versions:
                raise UnavailableError(
                    f"No relay delivered a policy version within {deadline_s:.0f} s.",
                    hint="Is the trainer running? Check the relay addresses with `shoal run status`.",
                )
            return self._versions[max(self._versions)]

    def wait_newer(self, version: int, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: max(self._versions, default=-1) > version or self._stopping.is_set(), timeout_s
            )

    def _follow(self) -> None:
        counter: int | None = None
        while not self._stopping.is_set():
            if self._is_held:
                self._stopping.wait(RETRY_S)
                continue
            try:
                head = self._weights.head(newer_than=counter, wait_s=LONG_POLL_S if counter else 0.0)
                self._take(head)
                counter = head.counter
            except _RestingError:
                continue
            except (ShoalError, OSError) as error:  # OSError: a full disk, which the contributor can cure
                if not self._stopping.is_set():
                    self._report(f"weights: {error}")
                    self._stopping.wait(RETRY_S)

    def _take(self, head: Head) -> None:
        """Fetch the newest version, or a newer one that appears meanwhile and costs less than the rest of this one."""
        if head.newest is None:
            return
        self._drop_withdrawn(head)
        if head.newest.version not in self._versions:
            started = time.monotonic()
            newest, path = self._weights.fetch_newest(deadline_s=FETCH_DEADLINE_S, on_progress=self._unless_held())
            self._fetched(newest.version, newest.manifest_digest, path, started)

    def _drop_withdrawn(self, head: Head) -> None:
        """The owner went back to an earlier version: what the head does not name is void, even if it is on disk. Versions that
        are older than the head may stay."""
        named = {entry.version: entry.manifest_digest for entry in head.versions}
        with self._changed:
            for version, held in list(self._versions.items()):
                if version >= min(named, default=0) and named.get(version) != held.manifest_digest:
                    del self._versions[version]

    def _unless_held(self) -> OnProgress:
        measured = self._measured()

        def note(progress: DownloadProgress) -> None:
            if self._is_held:
                raise _RestingError
            measured(progress)

        return note

    def _measured(self) -> OnProgress:
        """Tells how far a fetch is, and measures the link on the way."""
        line, seen = ProgressLine(self._report), 0

        def note(progress: DownloadProgress) -> None:
            nonlocal seen
            self._progress_at = time.monotonic()
            if progress.bytes_done > seen and progress.bytes_s:  # putting a version together is no transfer
                self.link_bytes_per_s = progress.bytes_s
            seen = progress.bytes_done
            line(progress)

        return note

    def _fetch(self, version: int, manifest_digest: str, deadline_s: float) -> Path:
        started = time.monotonic()
        path = self._weights.fetch_version(version, manifest_digest, within_s=deadline_s, on_progress=self._measured())
        self._fetched(version, manifest_digest, path, started)
        return path

    def _fetched(self, version: int, manifest_digest: str, path: Path, started: float) -> None:
        now = time.monotonic()
        self._metrics.event("weights_fetched", version=version, seconds=round(now - started, 3))
        with self._changed:
            held = self._versions.get(version)
            if held is None or held.manifest_digest != manifest_digest:
                self._versions[version] = HeldVersion(version, manifest_digest, path, now)
            for old in sorted(self._versions)[: -self._keep]:
                del self._versions[old]
            self._changed.notify_all()
