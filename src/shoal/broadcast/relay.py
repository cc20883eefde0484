"""A relay: follows parents that it does not trust and serves only what it has verified.

New heads come by long poll from parents and peers at once. A head is served as soon as its manifests are here; the shards follow,
newest version first, and a request for one that is still on its way is held until it arrives, so versions stream through a
chain of relays. With peers, each relay fetches its share from the parents and the rest from the others. A restarted relay serves
at once: what it finds is hashed when it is asked for, and in order of use.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.broadcast.download import MirrorProgress
from shoal.broadcast.heads import HeadWatch, ManifestCache
from shoal.broadcast.http.limits import ServerLimits
from shoal.broadcast.http.listener import ServerThread
from shoal.broadcast.http.pool import FetchError, check_url
from shoal.broadcast.http.server import DirectoryServer
from shoal.broadcast.manifest import Head, Manifest, descriptor_key
from shoal.broadcast.mesh import Mesh, Neighbours
from shoal.broadcast.peers import Asked, Deadline, Sources
from shoal.broadcast.queue import DownloadQueue, Route, WantedShard, wanted_in_order
from shoal.broadcast.retention import lack_of_space, needed_manifests, prune
from shoal.broadcast.store import DiskError, ShardStore
from shoal.errors import ConfigError, ShoalError, UnavailableError
from shoal.files import write_atomic
from shoal.identity import MAX_DESCRIPTOR_BYTES
from shoal.metrics import EventLog, Report, silent

log = logging.getLogger(__name__)

HEAD_POLL_S = 20.0
FIRST_HEAD_S = 3.0
HEAD_GRACE_S = 2.0
AFTER_TROUBLE_S = 1.0
DESCRIPTOR_WITHIN_S = 1.0
SHARD_DEADLINE_S = 120.0
ANNOUNCE_EVERY_S = 10.0
ANNOUNCE_PAUSE_S = 1.0
"""However often versions come."""
NOT_YET = (404, 503)
# Requests to peers that ended without the shard before it is fetched from the parents.
PEER_FAILURES = 6
CONNECTIONS = 4
# In a mesh many relays ask the parents, and few requests of each keep the shards in order; most requests to peers only wait.
MESH_PARENT_CONNECTIONS = 2
MESH_PEER_CONNECTIONS = 16


@dataclass(frozen=True)
class RelaySettings:
    """What the operator of a relay decides."""

    root: Path
    upstreams: Sequence[str]
    run_key: str | None = None
    """Without one the key of the first descriptor that a parent serves is pinned."""
    host: str = "127.0.0.1"
    port: int = 0
    public_url: str | None = None
    """How peers and workers reach this relay, if not by host and port."""
    peers: Sequence[str] = ()
    """Relays to exchange shards with, besides those that `Neighbours` learn from a coordinator."""
    limits: ServerLimits | None = None
    max_download_bytes_s: float = 0
    grace_s: float = 60.0
    """How long files of versions that left the head are still served."""


class Relay:
    """`start` returns when the relay listens; it then works on its own threads until `stop`.

    With `neighbours` it exchanges shards with peers and asks spare parents while every parent is unavailable; `announce` is
    called every ten seconds with the relay's address.
    """

    def __init__(
        self,
        settings: RelaySettings,
        *,
        neighbours: Neighbours | None = None,
        announce: Callable[[str], None] | None = None,
        metrics: EventLog | None = None,
        report: Report = silent,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if not settings.upstreams:
            raise ConfigError("A relay needs at least one upstream.", hint="Name the origin or another relay.")
        self.metrics = metrics or EventLog()
        self._settings = settings
        self._root = settings.root
        self._upstreams = [check_url(url) for url in settings.upstreams]
        if neighbours is None and settings.peers:
            neighbours = Neighbours(settings.upstreams, settings.peers)
        self._neighbours = neighbours
        self._announce = announce
        self._clock, self._monotonic = clock, monotonic
        self._store = ShardStore(self._root)
        self._queue = DownloadQueue(self._route)
        self._progress = MirrorProgress(report, clock=monotonic)
        self._unneeded_since: dict[str, float] = {}
        self._stopping = threading.Event()
        self._news = threading.Event()
        """Set when the newest version is here, so that the coordinator learns of it at once."""
        self._threads: list[threading.Thread] = []
        self.sources = Sources(
            self._known,
            named=self._upstreams,
            metrics=self.metrics,
            clock=monotonic,
            max_bytes_s=settings.max_download_bytes_s,
        )
        peers = neighbours.peers if neighbours is not None else list
        self._mesh = Mesh(lambda: self.url, peers, self.sources.alive)
        # A parent may wait for the same file from us: it can list us before we learn that it is a peer.
        self._above = Asked(self._parents, lambda url: neighbours is None or not neighbours.exchanges)
        directory = DirectoryServer(
            self._store,
            metrics=self.metrics,
            limits=settings.limits,
            expected=self._queue.expects,
        )
        self._server = ServerThread(
            directory.application, settings.host, settings.port, name="relay", limits=settings.limits
        )

    @property
    def url(self) -> str:
        return self._settings.public_url or self._server.url

    @property
    def complete(self) -> bool:
        """Whether everything that the newest head names is here."""
        return self._queue.empty

    def start(self) -> None:
        self._trusted_key()
        self._store.remove_leftovers()
        self._server.start()
        self._spawn("follower", self._follow)
        in_mesh = self._neighbours is not None
        for number in range(MESH_PARENT_CONNECTIONS if in_mesh else CONNECTIONS):
            self._spawn(f"parents {number}", lambda: self._fetch("parents"))
        for number in range(MESH_PEER_CONNECTIONS if in_mesh else 0):
            self._spawn(f"peers {number}", lambda: self._fetch("peers"))
        if self._announce is not None:
            self._spawn("announcer", self._announce_often)

    def stop(self) -> None:
        self._stopping.set()
        self._news.set()
        self.sources.stop()
        self._queue.close()
        self._server.stop()
        for thread in self._threads:
            thread.join(timeout=10)

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"relay {name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _follow(self) -> None:
        run_key = self._trusted_key() or self._learn_run_key()
        if run_key is None:
            return
        write_atomic(self._root / "run_key", run_key.encode())
        # Peers learn of a version at the same moment as we do: asked for its manifest, they could only wait like us.
        manifests = ManifestCache(self._store, self.sources, run_key, asked=self._above)
        path = self._root / "seen_head.json"
        watch = HeadWatch(
            self.sources,
            run_key,
            path,
            always_ask=self._upstreams,
            clock=self._clock,
            monotonic=self._monotonic,
        )
        seen = 0
        while not self._stopping.is_set():
            try:
                # As long as there is nothing to serve, the reason is reported every few seconds.
                wait_s = HEAD_POLL_S if seen else FIRST_HEAD_S
                watch.get(newer_than=seen, wait_s=wait_s, deadline_s=wait_s + HEAD_GRACE_S)
                data, head = watch.newest_signed
                if head is not None and head.counter > seen:
                    self._mirror(head, data, manifests)
                    seen = head.counter
                if not (self._root / "descriptor.json").exists():
                    self._mirror_descriptor(run_key)
            except Exception as error:
                if not isinstance(error, (ShoalError, OSError)):  # OSError: a full disk, which the operator can cure
                    log.exception("a new head was not mirrored")
                self._report_trouble(error)

    def _mirror(self, head: Head, head_bytes: bytes, manifests: ManifestCache) -> None:
        """Fetch the manifests of a new head, queue its shards, remove old files."""
        deadline = Deadline(self._monotonic, SHARD_DEADLINE_S)

        def load(digest: str) -> Manifest:
            self._queue.expect(digest)
            return manifests.get(digest, deadline=deadline)

        def peek(digest: str) -> Manifest:
            return manifests.get(digest, deadline=deadline, save=False)

        newest_first = [entry.manifest_digest for entry in reversed(head.versions)]
        try:
            needed = needed_manifests(newest_first, load)
            self._want(head, needed)
            self._store.put_head(head_bytes)
        except DiskError:
            # What the new head does not need makes room for what it needs.
            self._prune(head, needed_manifests(newest_first, peek), peek)
            raise
        self._tell_if_complete()
        self._prune(head, needed, load)
        self.metrics.event("head_mirrored", counter=head.counter, versions=len(head.versions))

    def _want(self, head: Head, needed: dict[str, Manifest]) -> None:
        wanted = wanted_in_order(head, needed)
        items = [item for item in wanted if not self._store.has("shards", item.digest)]
        version = head.newest.version if head.newest is not None else 0
        self._progress.begin(version, {item.digest: item.shard.size_bytes for item in items})
        self._queue.replace(items)
        if problem := lack_of_space(self._store, {item.digest: item.shard.size_bytes for item in wanted}):
            self.metrics.event("trouble", reason=problem)

    def _prune(self, head: Head, needed: dict[str, Manifest], load: Callable[[str], Manifest]) -> None:
        keep, grace_s = {file.digest for file in head.files}, self._settings.grace_s
        prune(self._store, needed, keep, self._unneeded_since, load, grace_s=grace_s, now=self._monotonic())

    def _route(self, item: WantedShard) -> Route:
        if self._neighbours is None or item.failures >= PEER_FAILURES:
            return "parents"
        return "parents" if self._mesh.owner(item.index) is None else "peers"

    def _fetch(self, route: Route) -> None:
        while (item := self._queue.take(route)) is not None:
            try:
                was_here = self._store.recover("shards", item.digest)
                if not was_here:
                    self._keep(item, self._from_parents(item) if route == "parents" else self._from_peer(item))
                self._queue.done(item)
                self._progress.arrived(item.digest, was_here=was_here)
                self._tell_if_complete()
            except Exception as error:
                if not isinstance(error, ShoalError):  # a thread that ends would leave its route unfetched
                    log.exception("the fetch of shard %s failed", item.digest)
                self._queue.put_back(item)
                if route == "parents":
                    self._report_trouble(error)
                elif not (isinstance(error, FetchError) and error.status in NOT_YET):
                    # A peer is gone or lied: its shards have another owner now.
                    self._queue.reroute()

    def _keep(self, item: WantedShard, data: memoryview) -> None:
        """Store a verified shard; while there is no room it is held, not fetched again, and nothing else is fetched."""
        while not self._stopping.is_set():
            try:
                self._store.put("shards", data, item.digest)
                return
            except DiskError as error:
                self._report_trouble(error)
        raise UnavailableError("Stopped before there was room for a shard.")

    def _from_parents(self, item: WantedShard) -> memoryview:
        return self.sources.shard(item.shard, deadline=Deadline(self._monotonic, SHARD_DEADLINE_S), asked=self._above)

    def _parents(self) -> Sequence[str]:
        """The parents that wait for no share of ours, or a living one that does; else every relay we know.

        One that was away for long and answers again counts at once: the others may have nothing but what comes from it."""
        peers = self._mesh.peers()
        usable = [url for url in self._upstreams if self.sources.alive(url) or self.sources.answers(url)]
        outside = [url for url in usable if url not in peers]
        inside = [url for url in self._upstreams if url in peers]
        return outside or inside or self.sources.urls()

    def _known(self) -> list[str]:
        known = [*self._upstreams, *self._mesh.peers()]
        if self._neighbours is not None and not any(self.sources.alive(url) for url in self._upstreams):
            known += [url for url in self._neighbours.spare_parents() if url != self.url]
        return known

    def _from_peer(self, item: WantedShard) -> memoryview:
        owner = self._mesh.owner(item.index)
        return self._from_parents(item) if owner is None else self.sources.shard_from(owner, item.shard)

    def _trusted_key(self) -> str | None:
        """The key that was given or pinned at first use."""
        run_key, pin = self._settings.run_key, self._root / "run_key"
        pinned = pin.read_text().strip() if pin.exists() else None
        if run_key and pinned and run_key != pinned:
            message = f"{self._root} belongs to the run of key {pinned[:12]}…, not {run_key[:12]}…."
            raise ConfigError(message, hint="Use another directory for this run.")
        return run_key or pinned

    def _learn_run_key(self) -> str | None:
        """The key of a parent's self-signed descriptor; None when stopped before any parent served one."""

        def attempt(url: str, until: float) -> str:
            return descriptor_key(self._fetch_descriptor(url, until))

        while not self._stopping.is_set():
            try:
                return self.sources.try_each("descriptor.json", attempt, Deadline(self._monotonic, FIRST_HEAD_S))
            except ShoalError as error:
                self._report_trouble(error)
        return None

    def _mirror_descriptor(self, run_key: str) -> None:
        def attempt(url: str, until: float) -> None:
            data = self._fetch_descriptor(url, until)
            descriptor_key(data, run_key)
            write_atomic(self._root / "descriptor.json", data)

        for url in self.sources.urls():
            with contextlib.suppress(ShoalError):  # recorded in its score
                self.sources.ask(url, "descriptor.json", attempt, self._monotonic() + DESCRIPTOR_WITHIN_S)
                break

    def _fetch_descriptor(self, url: str, deadline: float) -> bytes:
        return self.sources.fetch(url, "/descriptor.json", max_bytes=MAX_DESCRIPTOR_BYTES, deadline=deadline)

    def _report_trouble(self, error: Exception) -> None:
        if not self._stopping.is_set():
            self.metrics.event("trouble", reason=str(error))
            self._stopping.wait(AFTER_TROUBLE_S)

    def _tell_if_complete(self) -> None:
        if self.complete:
            self._news.set()

    def _announce_often(self) -> None:
        assert self._announce is not None
        while not self._stopping.is_set():
            self._news.clear()
            try:
                self._announce(self.url)
            except ShoalError as error:
                self._report_trouble(error)
            self._stopping.wait(ANNOUNCE_PAUSE_S)
            self._news.wait(ANNOUNCE_EVERY_S - ANNOUNCE_PAUSE_S)
