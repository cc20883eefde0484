"""The publisher: turns tensors into signed, content-addressed files and replaces the one pointer to them.

`stage` writes shards and manifest of a version, as a delta against the one before and in full every few versions; they are
invisible until `announce` replaces head.json. A version number that was announced keeps its bytes for ever: staging it again
with the same weights is free, with others it is refused. Any step may be killed and repeated; a restarted origin removes damaged
files and continues from the head it finds.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shoal.broadcast.baseline import SPAN_BYTES, Baselines, write_delta
from shoal.broadcast.codec.pieces import ITEM_BYTES, TensorBits
from shoal.broadcast.manifest import (
    MAX_CHAIN,
    MAX_SHARD_BYTES,
    BaseRef,
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
from shoal.broadcast.store import ShardCutter, ShardStore, map_file, needed_manifests, prune
from shoal.errors import ConfigError, IntegrityError
from shoal.files import digest_bytes
from shoal.identity import Keypair

# A delta that is not much smaller than the whole only makes chains longer.
LARGEST_DELTA = 0.5


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
        self._baselines = Baselines(root / ".baselines")
        self._clock = clock
        self._lock = threading.RLock()
        self._staged: dict[int, Publication] = {}
        self._unneeded_since: dict[str, float] = {}
        self.files_collected = 0
        """Shards and manifests of old versions that were removed since the start."""
        self.store.remove_leftovers()
        self._head = self._read_head()
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

    def stage(self, version: int, tensors: Iterable[WireTensor]) -> Publication:
        """Write a version's files without showing them to anybody yet; tensors are taken one at a time."""
        with self._lock, ThreadPoolExecutor(_worker_threads()) as pool:
            known = self._announced(version)
            if known is not None:
                return _same_weights(known, tensors)
            self._staged = {number: staged for number, staged in self._staged.items() if number < version}
            if self._settings.delta_from_bytes is None:
                # Without deltas nothing refers to a version, so no copy of it is kept.
                entries, full = self._write_tensors(tensors, None, pool, cut=True)
                return self._sign(version, entries, full, None)
            raw = self._baselines.temporary(version)
            publication = self._stage_with_delta(version, tensors, raw, pool)
            self._baselines.adopt(raw, publication.manifest_digest)
            return publication

    def _stage_with_delta(
        self, version: int, tensors: Iterable[WireTensor], raw: Path, pool: ThreadPoolExecutor
    ) -> Publication:
        base = self._base()
        entries, full = self._write_tensors(tensors, raw, pool, cut=base is None or self._keyframe_due(base[1]))
        delta = self._write_delta(entries, raw, *base, pool) if base is not None else None
        if delta is not None and delta.size_bytes > LARGEST_DELTA * sum(entry.size_bytes for entry in entries):
            delta = None
        if full is None and delta is None:
            full = self._cut_file(raw, pool)
        return self._sign(version, entries, full, delta)

    def announce(self, *, ledger_head: str) -> Head:
        """Show all staged versions at once, then delete what nobody needs any more."""
        with self._lock:
            entries = {entry.version: entry for entry in (self._head.versions if self._head else ())}
            for version, publication in self._staged.items():
                entries[version] = VersionEntry(version=version, manifest_digest=publication.manifest_digest)
            kept = sorted(entries.values(), key=lambda entry: entry.version)[-self._settings.keep_versions :]
            head = self._write_head(tuple(kept), ledger_head)
            self._staged.clear()
            self._baselines.keep_only(entry.manifest_digest for entry in head.versions[-1:])
            self._prune()
            return head

    def refresh(self) -> None:
        """Sign the head again when half of its life has passed, so that a slow step does not look like a frozen swarm."""
        with self._lock:
            if self._head is not None and self._head.expires_at - self._clock() < self._settings.head_ttl_s / 2:
                self._write_head(self._head.versions, self._head.ledger_head)

    def _write_tensors(
        self, tensors: Iterable[WireTensor], raw: Path | None, pool: ThreadPoolExecutor, *, cut: bool
    ) -> tuple[list[TensorEntry], Encoding | None]:
        """Copy all tensors into the next baseline, if one is kept, and, for a keyframe, into shards."""
        cutter = ShardCutter(self.store, self._settings.shard_bytes, pool)
        entries = []
        with open(raw or os.devnull, "wb", opener=_open_to_overwrite) as file:
            for tensor in tensors:
                copied = pool.submit(file.write, tensor.data)
                if cut:
                    cutter.feed(tensor.data)
                entries.append(tensor_entry(tensor))
                copied.result()
                cutter.join()
            if raw is not None:
                file.truncate()
        return entries, Encoding(kind="full", shards=cutter.finish()) if cut else None

    def _write_delta(
        self, entries: list[TensorEntry], raw: Path, digest: str, base: Manifest, pool: ThreadPoolExecutor
    ) -> Encoding:
        reference = BaseRef(version=base.version, manifest_digest=digest, weights_digest=base.weights_digest)
        new = TensorBits(tuple(entries), map_file(raw))
        old = self._baselines.bits(digest, base.tensors)
        cutter = ShardCutter(self.store, self._settings.shard_bytes, pool)
        return write_delta(old, reference, new, cutter, pool, self._settings.span_bytes)

    def _cut_file(self, raw: Path, pool: ThreadPoolExecutor) -> Encoding:
        cutter = ShardCutter(self.store, self._settings.shard_bytes, pool)
        cutter.feed(map_file(raw))
        return Encoding(kind="full", shards=cutter.finish())

    def _sign(
        self, version: int, entries: list[TensorEntry], full: Encoding | None, delta: Encoding | None
    ) -> Publication:
        manifest = Manifest(
            run_id=self._run_id,
            version=version,
            tensors=tuple(entries),
            weights_digest=digest_weights(entries),
            encodings=tuple(encoding for encoding in (full, delta) if encoding is not None),
        )
        digest = self.store.put("manifests", seal_manifest(manifest, self._run_key))
        self._staged[version] = _describe(manifest, digest)
        return self._staged[version]

    def _base(self) -> tuple[str, Manifest] | None:
        """The version that a delta would refer to: the newest staged one, or the newest announced one."""
        newest = self._head.newest if self._head else None
        digest = newest.manifest_digest if newest else None
        if self._staged:
            digest = self._staged[max(self._staged)].manifest_digest
        if digest is None:
            return None
        manifest = self._manifest(digest)
        small = manifest.size_bytes < (self._settings.delta_from_bytes or 0)
        return None if small or not self._baselines.usable(digest, manifest) else (digest, manifest)

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
        return open_manifest(self.store.read("manifests", digest), self._run_key.public)

    def _write_head(self, versions: tuple[VersionEntry, ...], ledger_head: str) -> Head:
        head = Head(
            run_id=self._run_id,
            counter=self._head.counter + 1 if self._head else 1,
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
        return open_head(data, self._run_key.public) if data is not None else None

    def _prune(self) -> None:
        assert self._head is not None
        manifests = needed_manifests((entry.manifest_digest for entry in self._head.versions), self._manifest)
        keep = set(self._files)
        self.files_collected += prune(
            self.store, manifests, keep, self._unneeded_since, grace_s=self._settings.grace_s, now=self._clock()
        )


def tensor_entry(tensor: WireTensor) -> TensorEntry:
    """The manifest line of a tensor whose bytes really have the size that its shape claims."""
    if tensor.dtype not in ITEM_BYTES:
        raise IntegrityError(f"Tensor {tensor.name} has dtype {tensor.dtype}; the wire knows {', '.join(ITEM_BYTES)}.")
    size_bytes = memoryview(tensor.data).nbytes
    if size_bytes != math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]:
        raise IntegrityError(f"Tensor {tensor.name} has {size_bytes} bytes, its shape {tensor.shape} says otherwise.")
    fields = {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "digest": digest_bytes(memoryview(tensor.data)),
    }
    return TensorEntry.model_validate(fields)


def _same_weights(known: Publication, tensors: Iterable[WireTensor]) -> Publication:
    if known.weights_digest != digest_weights(tensor_entry(tensor) for tensor in tensors):
        message = f"Version {known.version} was announced with other weights."
        raise IntegrityError(message, hint="Publish under a new number.")
    return known


def _describe(manifest: Manifest, digest: str) -> Publication:
    kind: EncodingKind = "full" if manifest.encoding("full") else "delta"
    smallest = min(encoding.size_bytes for encoding in manifest.encodings)
    return Publication(manifest.version, digest, manifest.weights_digest, smallest, manifest.size_bytes, kind)


def _open_to_overwrite(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC, 0o644)


def _worker_threads() -> int:
    return max(1, min(4, os.cpu_count() or 1))
