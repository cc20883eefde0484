"""The publisher: turns tensors into signed, content-addressed files and replaces the one pointer to them.

`stage` writes shards and manifest of a version, as a delta against the one before and in full every few versions; they are
invisible until `announce` replaces head.json. A version number that was announced keeps its bytes for ever: staging it again
with the same weights is free, with others it is refused, unless a rewind voided it (`take_up`). Any step may be killed and
repeated; a restarted origin removes damaged files and continues from the head it finds.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.broadcast.manifest import (
    MAX_CHAIN,
    MAX_SHARD_BYTES,
    AdaptedBase,
    Encoding,
    EncodingKind,
    Head,
    Manifest,
    ShardEntry,
    TensorEntry,
    VersionEntry,
    WireTensor,
    digest_weights,
    open_head,
    open_manifest,
    seal_head,
    seal_manifest,
)
from shoal.broadcast.published import SPAN_BYTES, PublishedVersion, RememberedVersion, write_delta
from shoal.broadcast.retention import needed_manifests, prune
from shoal.broadcast.store import HEAD_FILE, ShardCutter, ShardStore
from shoal.broadcast.wire import TensorDigests, WireBits, check_tensors
from shoal.errors import ConfigError, IntegrityError, SignatureError
from shoal.identity import Keypair

# A delta that is not much smaller than the whole only makes chains longer.
LARGEST_DELTA = 0.5
MANIFESTS_OPEN = 32


@dataclass(frozen=True)
class Publication:
    version: int
    manifest_digest: str
    weights_digest: str
    follow_bytes: int
    """What a client that holds the version before downloads: the delta where there is one."""
    weights_bytes: int
    kind: EncodingKind

    @property
    def ratio(self) -> float:
        """How many times less than the whole a follower downloads."""
        return self.weights_bytes / self.follow_bytes if self.follow_bytes else 1.0


@dataclass(frozen=True)
class OriginSettings:
    run_id: str = ""
    shard_bytes: int = 2 << 20
    keep_versions: int = 8
    head_ttl_s: float = 3600
    grace_s: float = 60
    """How long files of versions that left the head are still served."""
    keyframe_every: int = 8
    """One version of this many is also published in full."""
    delta_from_bytes: int | None = 16 << 20
    """Smaller models are published in full only; None switches deltas off."""
    span_bytes: int = SPAN_BYTES
    adapts: AdaptedBase | None = None
    """The frozen weights that every version is an adapter of."""
    remember_bytes: int = 1 << 29
    """Up to this size the newest version stays in memory too, which makes the next delta cheaper."""

    def __post_init__(self) -> None:
        if not 0 < self.shard_bytes <= MAX_SHARD_BYTES:
            raise ConfigError(f"A shard of {self.shard_bytes} bytes is outside 1 … {MAX_SHARD_BYTES}.")
        if not 0 < self.keyframe_every <= MAX_CHAIN:
            raise ConfigError(f"A keyframe every {self.keyframe_every} versions is outside 1 … {MAX_CHAIN}.")


class Origin:
    """One per run; the trainer's process owns the directory. Safe to call from several threads."""

    def __init__(
        self,
        root: Path,
        run_key: Keypair,
        settings: OriginSettings | None = None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = root
        self.store = ShardStore(root, clock=monotonic)
        self._run_key = run_key
        self._settings = settings = settings or OriginSettings()
        self._run_id = settings.run_id or run_key.public[:16]
        self._clock = clock
        # Staging takes minutes; the head must be signed again meanwhile.
        self._staging = threading.RLock()
        self._lock = threading.RLock()
        self._staged: dict[int, Publication] = {}
        self._open_manifests: dict[str, Manifest] = {}
        self._remembered = RememberedVersion(settings.remember_bytes if settings.delta_from_bytes is not None else 0)
        self._unneeded_since: dict[str, float] = {}
        self.files_collected = 0
        """Shards and manifests of old versions that were removed since the start."""
        self.store.remove_leftovers()
        self._head = self._read_head()
        self._epoch = self._head.epoch if self._head else 0
        self._files = {file.digest: file for file in self._head.files} if self._head else {}

    @property
    def head(self) -> Head | None:
        return self._head

    def add_file(self, data: bytes) -> str:
        """Serve a small file (tokenizer, config) beside the shards for as long as the run lasts."""
        if not 0 < len(data) <= MAX_SHARD_BYTES:
            raise IntegrityError(f"A served file of {len(data)} bytes is outside 1 … {MAX_SHARD_BYTES}.")
        digest = self.store.put("shards", data)
        with self._lock:
            self._files[digest] = ShardEntry(digest=digest, size_bytes=len(data))
        return digest

    def add_base(self, tensors: Iterable[WireTensor]) -> AdaptedBase:
        """Publish frozen weights in full. They are served from now on, and kept as long as a version names them."""
        checked = check_tensors(tensors)
        with self._staging, ThreadPoolExecutor(_worker_threads()) as pool:
            digests = TensorDigests(checked, pool)
            full = self._write_full(checked, digests, pool)
            manifest = self._manifest_of(0, digests.entries(), (full,), None)
            digest = self.store.put("manifests", seal_manifest(manifest, self._run_key))
            return AdaptedBase(manifest_digest=digest, weights_digest=manifest.weights_digest)

    def stage(self, version: int, tensors: Iterable[WireTensor]) -> Publication:
        """Write a version's files without showing them to anybody yet; the tensors must not change meanwhile."""
        checked = check_tensors(tensors)
        with self._staging, ThreadPoolExecutor(_worker_threads()) as pool:
            digests = TensorDigests(checked, pool)
            known = self._announced(version)
            if known is not None:
                return _same_weights(known, digests.entries())
            self._staged = {number: staged for number, staged in self._staged.items() if number < version}
            base = self._base(checked, pool)
            self._remembered.begin(sum(len(tensor.data) for tensor in checked))
            full = delta = None
            if base is None or self._keyframe_due(base.manifest):
                full = self._write_full(checked, digests, pool)
            if base is not None:
                delta = self._write_delta(checked, digests, base, pool)
            else:
                self._remember(checked)
            if full is None and delta is None:
                full = self._write_full(checked, digests, pool)
            publication = self._sign(version, digests.entries(), full, delta)
            self._remembered.end(publication.manifest_digest)
            return publication

    def announce(self, *, ledger_head: str) -> Head:
        """Show all staged versions at once, then delete what nobody needs any more."""
        with self._staging:
            entries = {entry.version: entry for entry in (self._head.versions if self._head else ())}
            for version, publication in self._staged.items():
                digest = publication.manifest_digest
                entries[version] = VersionEntry(version=version, manifest_digest=digest, epoch=self._epoch)
            kept = sorted(entries.values(), key=lambda entry: entry.version)[-self._settings.keep_versions :]
            head = self._write_head(tuple(kept), ledger_head)
            self._staged.clear()
            self._prune()
            return head

    def take_up(self, epoch: int, is_void: Callable[[int, int], bool], *, ledger_head: str) -> list[int]:
        """Go on in this epoch: versions that a rewind voided leave the head, in one step; their numbers are returned.

        `is_void` is given the epoch in which a version was made, and its number.
        The head is newer than any before, so that nobody who has seen it takes an old one again.
        """
        with self._staging, self._lock:
            self._epoch = epoch
            if self._head is None or self._head.epoch == epoch:
                return []
            voided = [one.version for one in self._head.versions if is_void(one.epoch, one.version)]
            kept = tuple(entry for entry in self._head.versions if entry.version not in voided)
            self._staged.clear()
            self._write_head(kept, ledger_head)
            self._prune()
            return voided

    def refresh(self) -> None:
        """Sign the head again when half of its life has passed, so that a slow step does not look like a frozen swarm."""
        with self._lock:
            if self._head is not None and self._head.expires_at - self._clock() < self._settings.head_ttl_s / 2:
                self._write_head(self._head.versions, self._head.ledger_head)

    def _write_full(self, tensors: list[WireTensor], digests: TensorDigests, pool: ThreadPoolExecutor) -> Encoding:
        cutter = ShardCutter(self.store, self._settings.shard_bytes, pool)
        for number in range(len(tensors)):
            for leaf in digests.leaves(number):
                cutter.feed_leaf(leaf.data, leaf.digest)
        return Encoding(kind="full", shards=cutter.finish())

    def _remember(self, tensors: list[WireTensor]) -> None:
        start = 0
        for tensor in tensors:
            if len(tensor.data):
                self._remembered.put(start, np.frombuffer(tensor.data, np.uint8))
            start += len(tensor.data)

    def _write_delta(
        self, tensors: list[WireTensor], digests: TensorDigests, base: PublishedVersion, pool: ThreadPoolExecutor
    ) -> Encoding | None:
        """None if the delta is no better than the whole."""
        cutter = ShardCutter(self.store, self._settings.shard_bytes, pool)
        new, span_bytes = WireBits(tensors), self._settings.span_bytes
        delta = write_delta(base, new, digests, cutter, pool, span_bytes, self._remembered)
        return delta if delta.size_bytes <= LARGEST_DELTA * base.manifest.size_bytes else None

    def _sign(
        self, version: int, entries: list[TensorEntry], full: Encoding | None, delta: Encoding | None
    ) -> Publication:
        encodings = tuple(encoding for encoding in (full, delta) if encoding is not None)
        manifest = self._manifest_of(version, entries, encodings, self._settings.adapts)
        digest = self.store.put("manifests", seal_manifest(manifest, self._run_key))
        self._staged[version] = _describe(manifest, digest)
        return self._staged[version]

    def _manifest_of(
        self, version: int, entries: list[TensorEntry], encodings: tuple[Encoding, ...], adapts: AdaptedBase | None
    ) -> Manifest:
        return Manifest(
            run_id=self._run_id,
            epoch=self._epoch,
            version=version,
            tensors=tuple(entries),
            weights_digest=digest_weights(entries),
            adapts=adapts,
            encodings=encodings,
        )

    def _base(self, tensors: list[WireTensor], pool: ThreadPoolExecutor) -> PublishedVersion | None:
        """The version that a delta would refer to: the newest staged one, or the newest announced one."""
        newest = self._head.newest if self._head else None
        digest = newest.manifest_digest if newest else None
        if self._staged:
            digest = self._staged[max(self._staged)].manifest_digest
        smallest = self._settings.delta_from_bytes
        if digest is None or smallest is None or self._manifest(digest).size_bytes < smallest:
            return None
        # Newest first, back to one that is there in full.
        chain = list(needed_manifests([digest], self._manifest).items())
        base = PublishedVersion(self.store, chain[::-1], self._settings.span_bytes, self._remembered)
        return base if base.usable(tensors, pool) else None

    def _keyframe_due(self, manifest: Manifest) -> bool:
        """Whether the chain of deltas back to the last full version is as long as it may become."""
        length = 1
        while (base := manifest.required_base) is not None and length < self._settings.keyframe_every:
            manifest = self._manifest(base)
            length += 1
        return length >= self._settings.keyframe_every

    def _announced(self, version: int) -> Publication | None:
        entry = self._head.entry(version) if self._head else None
        if entry is not None:
            return _describe(self._manifest(entry.manifest_digest), entry.manifest_digest)
        newest = self._head.newest if self._head else None
        if newest is not None and version < newest.version:
            raise IntegrityError(f"Version {version} cannot follow the announced version {newest.version}.")
        return None

    def _manifest(self, digest: str) -> Manifest:
        """Opening one of a large model takes a second, so the last few stay open."""
        if digest not in self._open_manifests:
            self._open_manifests[digest] = open_manifest(self.store.read("manifests", digest), self._run_key.public)
            for old in list(self._open_manifests)[:-MANIFESTS_OPEN]:
                del self._open_manifests[old]
        return self._open_manifests[digest]

    def _write_head(self, versions: tuple[VersionEntry, ...], ledger_head: str) -> Head:
        with self._lock:
            head = Head(
                run_id=self._run_id,
                counter=self._head.counter + 1 if self._head else 1,
                epoch=self._epoch,
                expires_at=self._clock() + self._settings.head_ttl_s,
                ledger_head=ledger_head,
                versions=versions,
                files=tuple(self._files.values()),
            )
            self.store.put_head(seal_head(head, self._run_key), sync=True)
            self._head = head
            return head

    def _read_head(self) -> Head | None:
        data = self.store.head()
        try:
            return open_head(data, self._run_key.public) if data is not None else None
        except (IntegrityError, SignatureError) as error:
            raise IntegrityError(
                f"{self.root / HEAD_FILE} is damaged or belongs to another run: {error}",
                hint="Its counter must never fall: copy head.json from a relay or from a backup into its place.",
            ) from None

    def _prune(self) -> None:
        assert self._head is not None
        manifests = needed_manifests((entry.manifest_digest for entry in self._head.versions), self._manifest)
        self.files_collected += prune(
            self.store,
            manifests,
            set(self._files),
            self._unneeded_since,
            self._manifest,
            grace_s=self._settings.grace_s,
            now=self._clock(),
        )


def _same_weights(known: Publication, entries: list[TensorEntry]) -> Publication:
    if known.weights_digest != digest_weights(entries):
        message = f"Version {known.version} was announced with other weights."
        raise IntegrityError(message, hint="Publish under a new number.")
    return known


def _describe(manifest: Manifest, digest: str) -> Publication:
    kind: EncodingKind = "full" if manifest.encoding("full") else "delta"
    smallest = min(encoding.size_bytes for encoding in manifest.encodings)
    return Publication(manifest.version, digest, manifest.weights_digest, smallest, manifest.size_bytes, kind)


def _worker_threads() -> int:
    return max(1, min(4, os.cpu_count() or 1))
