"""Weights from relays that nobody trusts, as a verified model.safetensors on disk.

`head` names the versions, `fetch_version` makes one a directory with exactly that file. Every shard is checked on arrival and
written in place into a staged file, the whole again before it gets its name; a killed client resumes without fetching a
verified byte twice. All calls block and may come from any thread. A deadline counts from the last verified bytes, so that a slow
link takes long but arrives.
"""

import contextlib
import itertools
import math
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.broadcast.download import DownloadProgress, OnProgress, ShardFetch, StopWhen
from shoal.broadcast.heads import HeadNews, HeadWatch, ManifestCache
from shoal.broadcast.manifest import MAX_SHARD_BYTES, AdaptedBase, Head, Manifest, VersionEntry
from shoal.broadcast.peers import ANSWER_WITHIN_S, Deadline, Sources
from shoal.broadcast.plan import Plan, cheapest_plan
from shoal.broadcast.retention import least_used_first
from shoal.broadcast.scores import RelayReport
from shoal.broadcast.staging import StagingArea, check_weights
from shoal.broadcast.store import DiskError, ShardStore, Trash, make_directory
from shoal.errors import IntegrityError, UnavailableError
from shoal.files import WEIGHTS_FILE, is_digest
from shoal.metrics import EventLog


@dataclass(frozen=True)
class Preview:
    version: int
    fetch_bytes: int
    """Of the cheapest plan from what is already here."""
    size_bytes: int
    staging_bytes: int
    """Beside the versions that are kept: the copy that is being put together, a delta, and the version that it refers to."""


@dataclass(frozen=True)
class WeightClientSettings:
    run_id: str = ""
    keep_versions: int = 3
    connections: int = 4
    owner_relays: Sequence[str] = ()
    """Relays that the owner names: asked before strangers that have not served yet."""
    adapts: AdaptedBase | None = None
    """What versions must be adapters of; None where they are whole policies."""
    answer_within_s: float = ANSWER_WITHIN_S
    """How long a relay may take to answer before another is asked."""


class WeightClient:
    """One per process and cache directory."""

    def __init__(
        self,
        run_key: str,
        relays: Callable[[], Sequence[str]],
        cache_dir: Path,
        settings: WeightClientSettings | None = None,
        *,
        metrics: EventLog | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        # One directory per run: counters and versions of different runs have nothing to do with each other.
        self._root = cache_dir / run_key[:16]
        self._versions = self._root / "versions"
        make_directory(self._versions)
        self._settings = settings = settings or WeightClientSettings()
        self._store = ShardStore(self._root)
        self._metrics = metrics or EventLog()
        self._monotonic = monotonic
        self._sources = Sources(
            relays,
            named=settings.owner_relays,
            metrics=self._metrics,
            rng=rng,
            clock=monotonic,
            answer_within_s=settings.answer_within_s,
        )
        self._manifests = ManifestCache(self._store, self._sources, run_key)
        self._watch = HeadWatch(
            self._sources,
            run_key,
            self._root / "head.json",
            run_id=settings.run_id,
            always_ask=settings.owner_relays,
            clock=clock,
            monotonic=monotonic,
        )
        self._trash = Trash(self._root / "trash")
        self._staging = StagingArea(self._root / "staging", self._trash)
        self._checked: dict[str, int] = {}  # versions that this process found right, and which use was their last one
        self._uses = itertools.count()
        self._busy = threading.Lock()

    def head(self, *, newer_than: int | None = None, wait_s: float = 0, deadline_s: float = 30) -> Head:
        """The newest head; with `newer_than`, waits up to `wait_s` for a higher counter and then returns what there is."""
        return self._watch.get(newer_than=newer_than, wait_s=wait_s, deadline_s=max(deadline_s, wait_s))

    def fetch_file(self, digest: str, *, max_bytes: int = MAX_SHARD_BYTES, deadline_s: float = 60) -> bytes:
        """A small file that is served beside the shards."""
        if self._store.recover("shards", digest):
            return self._store.read("shards", digest)
        data = self._sources.file(digest, max_bytes=max_bytes, deadline=Deadline(self._monotonic, deadline_s))
        self._store.put("shards", data, digest)
        return data

    def preview(self, *, deadline_s: float = 30) -> "Preview | None":
        """What fetching the newest version would cost; None while there is none."""
        deadline = Deadline(self._monotonic, deadline_s)
        newest = self.head(deadline_s=deadline_s).newest
        if newest is None:
            return None
        manifest = self._manifests.get(newest.manifest_digest, deadline=deadline)
        plan = self._plan(newest.manifest_digest, deadline)
        delta = manifest.encoding("delta")
        # One that missed several versions makes each from the one before: two copies that it does not keep.
        staging_bytes = manifest.size_bytes if delta is None else 2 * manifest.size_bytes + delta.size_bytes
        return Preview(newest.version, plan.fetch_bytes, manifest.size_bytes, staging_bytes)

    def held_bytes(self) -> int:
        """What versions and unfinished copies take on disk now, without a base, which stays beside them."""
        held_bytes = 0
        for path in [*self._versions.rglob("*"), *self._staging.root.rglob("*")]:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                if path.is_file() and path.parent.name != self._base_digest:
                    held_bytes += path.stat().st_blocks * 512
        return held_bytes

    def fetch_version(
        self,
        version: int,
        manifest_digest: str,
        *,
        deadline_s: float = 600,
        within_s: float = math.inf,
        on_progress: OnProgress | None = None,
    ) -> Path:
        """A directory that holds the verified model.safetensors of this version and nothing else.

        Fails when nothing has arrived for `deadline_s`, or when `within_s` have passed in all. Cached; the newest
        `keep_versions` directories stay, older ones are deleted after a fetch.
        """
        if not is_digest(manifest_digest):
            raise IntegrityError(f"{manifest_digest[:80]!r} is not a manifest digest.")
        deadline = Deadline(self._monotonic, deadline_s, self._monotonic() + within_s)
        ready = self._fetch(version, manifest_digest, deadline, on_progress)
        assert ready is not None, "only a fetch of the newest version is ended early"
        return ready

    def fetch_base(self, *, deadline_s: float = 600, on_progress: OnProgress | None = None) -> Path:
        """A directory with the verified frozen weights that the versions adapt; it is fetched once and stays."""
        base = self._settings.adapts
        assert base is not None, "these versions adapt nothing"
        deadline = Deadline(self._monotonic, deadline_s)
        if self._manifests.get(base.manifest_digest, deadline=deadline).weights_digest != base.weights_digest:
            raise IntegrityError("The base of this run has other weights than its descriptor says.")
        ready = self._fetch(0, base.manifest_digest, deadline, on_progress)
        assert ready is not None, "nothing ends this fetch early"
        return ready

    def fetch_newest(
        self, *, deadline_s: float = 600, on_progress: OnProgress | None = None
    ) -> tuple[VersionEntry, Path]:
        """The newest version; switches to a newer one as soon as that costs less than what is left of the old."""
        deadline = Deadline(self._monotonic, deadline_s)
        head = self.head(deadline_s=deadline_s)
        while True:
            if head.newest is None:
                raise UnavailableError("Nothing has been published yet.", hint="Is the trainer running?")
            path = self._fetch_unless_superseded(head.newest, head.counter, deadline, on_progress)
            if path is not None:
                return head.newest, path
            self._metrics.event("fetch_superseded", version=head.newest.version)
            head = self.head(deadline_s=deadline.left_s)

    def reports(self) -> list[RelayReport]:
        return self._sources.reports()

    def close(self) -> None:
        """End every wait; calls under way fail soon."""
        self._sources.stop()
        self._trash.close()

    def _usable(self, digest: str, manifest: Manifest, on_tensor: Callable[[], None] = lambda: None) -> bool:
        """Whether the version is on disk; its bytes are hashed once per process, because a power cut may have damaged them."""
        ready = self._versions / digest
        if not ready.exists():
            return False
        if digest not in self._checked:
            try:
                check_weights(ready / WEIGHTS_FILE, manifest, on_tensor)
            except (IntegrityError, OSError):
                self._trash.drop(ready)
                return False
        self._checked[digest] = next(self._uses)
        with contextlib.suppress(OSError):  # a version that is here can be used on a disk that takes no more bytes
            os.utime(ready)
        return True

    def _fetch_unless_superseded(
        self, wanted: VersionEntry, counter: int, deadline: Deadline, on_progress: OnProgress | None
    ) -> Path | None:
        def price(newer: VersionEntry) -> float:
            return self._plan(newer.manifest_digest, deadline).fetch_bytes

        with HeadNews(self._watch, counter, wanted, price) as news:

            def superseded(progress: DownloadProgress) -> bool:
                return news.cheapest_newer <= progress.bytes_left

            return self._fetch(wanted.version, wanted.manifest_digest, deadline, on_progress, superseded)

    def _fetch(
        self,
        version: int,
        digest: str,
        deadline: Deadline,
        on_progress: OnProgress | None,
        stop_when: StopWhen | None = None,
    ) -> Path | None:
        """The version's directory; None if `stop_when` ended it."""
        remaining_s = deadline.left_s
        if not self._busy.acquire(timeout=remaining_s):
            raise UnavailableError(f"Another fetch of this client did not end within {remaining_s:.0f} s.")
        try:
            manifest = self._manifests.get(digest, deadline=deadline)
            if manifest.version != version:
                raise IntegrityError(f"Manifest {digest[:12]}… is of version {manifest.version}, not of {version}.")
            if digest != self._base_digest and manifest.adapts != self._settings.adapts:
                raise IntegrityError(f"Version {version} is not an adapter of the base that the run names.")
            whole = DownloadProgress(version, manifest.size_bytes, manifest.size_bytes, manifest.size_bytes)

            def still_checking() -> None:
                deadline.progress()
                if on_progress is not None:
                    on_progress(whole)

            if not self._usable(digest, manifest, still_checking) and not self._obtain(
                digest, deadline, on_progress, stop_when
            ):
                return None
            ready = self._versions / digest
            try:
                self._prune(ready)
            except (DiskError, OSError) as error:  # a version that is here can be used on a disk that cannot be written
                self._metrics.event("trouble", reason=str(error))
            return ready
        finally:
            self._busy.release()

    def _obtain(
        self, wanted: str, deadline: Deadline, on_progress: OnProgress | None, stop_when: StopWhen | None
    ) -> bool:
        """Follow the cheapest plan; once more if the disk turns out to have lost something."""
        try:
            return self._follow_plan(wanted, deadline, on_progress, stop_when)
        except IntegrityError as error:
            reason = str(error)
        # Outside the handler, so that what the failed attempt held is free.
        self._metrics.event("fetch_repeated", reason=reason)
        return self._follow_plan(wanted, deadline, on_progress, stop_when)

    def _follow_plan(
        self, wanted: str, deadline: Deadline, on_progress: OnProgress | None, stop_when: StopWhen | None
    ) -> bool:
        plan = self._plan(wanted, deadline)
        self._staging.keep_only(plan.encodings)

        def load(digest: str) -> Manifest:
            return self._manifests.get(digest, deadline=deadline)

        version = load(wanted).version
        self._metrics.event("fetch_planned", version=version, bytes=plan.fetch_bytes, deltas=len(plan.steps))
        fetch = ShardFetch(
            self._sources,
            DownloadProgress(version, plan.size_bytes, clock=self._monotonic),
            on_progress=on_progress,
            stop_when=stop_when,
            connections=self._settings.connections,
            deadline=deadline,
        )
        if plan.fetch_full and not self._build(plan.start, load(plan.start), None, fetch):
            return False
        base, only_a_step = plan.start, plan.fetch_full
        for digest in plan.steps:
            if not self._build(digest, load(digest), (self._versions / base / WEIGHTS_FILE, load(base)), fetch):
                return False
            if only_a_step:
                # Of a long chain at most two copies are on disk at a time.
                self._checked.pop(base, None)
                self._staging.retire(self._versions / base)
            base, only_a_step = digest, True
        return True

    def _plan(self, wanted: str, deadline: Deadline) -> Plan:
        def load(digest: str) -> Manifest:
            return self._manifests.get(digest, deadline=deadline)

        def peek(digest: str) -> Manifest:
            return self._manifests.get(digest, deadline=deadline, absent_after_s=0)

        def held(digest: str) -> bool:
            return self._usable(digest, load(digest), deadline.progress)

        return cheapest_plan(wanted, load, peek, held, self._staging.staged_bytes)

    def _build(self, digest: str, manifest: Manifest, base: tuple[Path, Manifest] | None, fetch: ShardFetch) -> bool:
        """Fetch one encoding of a version and put it together; the name is given only to bytes with the right digest."""
        encoding = manifest.encoding("full" if base is None else "delta")
        assert encoding is not None
        staged = self._staging.begin(manifest, digest, encoding)
        try:
            if not fetch.run(encoding.shards, staged.missing(), staged.write):
                return False
            if base is not None:
                staged.apply(*base, fetch.still_working)
            staged.finish(self._versions / digest, fetch.still_working)
            self._checked[digest] = next(self._uses)
            return True
        except IntegrityError:
            # All shards were verified, so the disk has lost something: in the staged file, or in the base.
            self._trash.drop(self._staging.path(digest, encoding.kind))
            self._checked.clear()
            raise
        finally:
            staged.close()

    @property
    def _base_digest(self) -> str:
        return self._settings.adapts.manifest_digest if self._settings.adapts is not None else ""

    def _prune(self, keep: Path) -> None:
        versions = [path for path in self._versions.iterdir() if path.name != self._base_digest]
        for directory in least_used_first(versions, self._checked)[: -self._settings.keep_versions]:
            if directory != keep:
                self._checked.pop(directory.name, None)
                self._staging.retire(directory)
        self._staging.keep_only()
        kept = {directory.name for directory in self._versions.iterdir()}
        self._store.remove("manifests", self._store.held("manifests") - kept)
