"""The policy versions of a validator: fetched on a thread, so that files of other versions are verified meanwhile.

Versions that files wait for come first; the newest one is fetched before it has files. `ready` names versions that can be loaded
at once. A version that could not be had counts as ready until its failure was reported: the file that needs it then returns to the
coordinator, which knows how long to wait for it. No worker is penalised. One that was only expected and could not be had is fetched
again when a file needs it. How long a fetch may take is a matter of progress: only one to which nothing arrives is ended.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.broadcast import WeightClient
from shoal.broadcast.download import ProgressLine
from shoal.errors import ShoalError, UnavailableError
from shoal.metrics import Report, silent
from shoal.protocol import api

log = logging.getLogger(__name__)

STALLED_S = 60.0
"""A fetch to which nothing arrived for so long is ended, and begun again when the version is asked for again."""


class HeldVersions:
    def __init__(
        self,
        weights: WeightClient,
        report: Report = silent,
        *,
        stalled_s: float = STALLED_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._weights, self._report, self._stalled_s, self._clock = weights, report, stalled_s, clock
        self._changed = threading.Condition()
        self._wanted: dict[str, int] = {}
        """Versions by manifest, in the order in which they are fetched."""
        self._expected: api.WantedVersion | None = None
        """The newest one, while it is neither fetched nor superseded."""
        self._newest: api.WantedVersion | None = None
        """The last one that was expected."""
        self._paths: dict[str, Path] = {}
        self._failures: dict[str, str] = {}
        self._begun_at = 0.0
        self._thread: threading.Thread | None = None

    def ready(self) -> list[str]:
        """Manifests of versions on disk, and of those whose failure is to be reported."""
        with self._changed:
            self._paths = {digest: path for digest, path in self._paths.items() if path.exists()}
            return [*self._paths, *self._failures]

    def wanted(self) -> list[str]:
        """Of files that wait."""
        with self._changed:
            return list(self._wanted)

    def fetching(self) -> list[str]:
        with self._changed:
            expected = [self._expected.manifest_digest] if self._expected else []
            return list(dict.fromkeys([*self._wanted, *expected]))

    def fetching_s(self) -> float:
        """How long the fetch that runs has taken so far."""
        with self._changed:
            return self._clock() - self._begun_at

    @property
    def newest(self) -> str | None:
        """Manifest of the last version that was expected."""
        return self._newest.manifest_digest if self._newest is not None else None

    def newest_ready(self) -> api.WantedVersion | None:
        """The last version that was expected, if it is on disk."""
        with self._changed:
            is_here = self._newest is not None and self._newest.manifest_digest in self._paths
            return self._newest if is_here else None

    def want(self, versions: Sequence[api.WantedVersion]) -> None:
        with self._changed:
            for wanted in versions:
                if wanted.manifest_digest not in self._paths:
                    self._wanted.setdefault(wanted.manifest_digest, wanted.version)
            self._start()

    def expect(self, newest: api.WantedVersion | None) -> None:
        """The newest version, which files will need: fetched behind those that files need now, instead of an older expected one."""
        with self._changed:
            if newest is not None:
                self._expected = self._newest = newest
            self._start()

    def _start(self) -> None:
        if (self._wanted or self._expected) and self._thread is None:
            self._begun_at = self._clock()
            self._thread = threading.Thread(target=self._fetch_all, name="versions", daemon=True)
            self._thread.start()

    def path(self, version: int, manifest_digest: str) -> Path:
        """The directory of a version; fetched here and now if nobody asked for it before."""
        with self._changed:
            path, failure = self._paths.get(manifest_digest), self._failures.pop(manifest_digest, None)
        if failure is not None:
            raise UnavailableError(failure)
        if path is not None and path.exists():
            with contextlib.suppress(OSError):  # the client keeps what was used last; its own fetches hold its lock
                os.utime(path)
            return path
        return self._fetch(version, manifest_digest)

    def _fetch_all(self) -> None:
        while (following := self._next()) is not None:
            failure = ""
            try:
                self._fetch(following.version, following.manifest_digest)
            except ShoalError as error:
                failure = str(error)
                self._report(failure)
            except Exception as error:
                # Without this thread the version would be waited for until the validator is restarted.
                log.exception("the fetch of version %d failed", following.version)
                failure = f"Version {following.version} cannot be had: {type(error).__name__}: {error}"
                self._report(failure)
            self._ended(following.manifest_digest, failure)

    def _next(self) -> api.WantedVersion | None:
        with self._changed:
            if self._wanted:
                digest, version = next(iter(self._wanted.items()))
                return api.WantedVersion(version=version, manifest_digest=digest)
            if self._expected is None:
                self._thread = None
            return self._expected

    def _ended(self, digest: str, failure: str) -> None:
        with self._changed:
            self._begun_at = self._clock()  # of the next one, if any
            needed = self._wanted.pop(digest, None) is not None
            if failure and needed:
                self._failures[digest] = failure
            if self._expected is not None and self._expected.manifest_digest == digest:
                self._expected = None
            self._changed.notify_all()

    def _fetch(self, version: int, manifest_digest: str) -> Path:
        said = list[str]()

        def report(line: str) -> None:
            said.append(line)
            self._report(line)

        try:
            path = self._weights.fetch_version(
                version, manifest_digest, deadline_s=self._stalled_s, on_progress=ProgressLine(report)
            )
        except ShoalError as error:
            raise UnavailableError(f"Version {version} cannot be had: {error}") from error
        if said:  # or the log would end with the last line of a fetch that is long over
            self._report(f"has version {version} of the policy")
        with self._changed:
            self._paths[manifest_digest] = path
        return path
