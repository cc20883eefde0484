"""The publisher: turns tensors into signed, content-addressed files and moves the one pointer to them.

`stage` writes shards and manifest of a version, as a delta against the one before and in full every few versions; nobody can
see them until `announce` replaces head.json. A version number that was announced keeps its bytes for ever: staging it again
with the same weights is free, with others it is refused. Any step may be killed and repeated; a restarted origin drops damaged
files and goes on from the head it finds.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

from shoal.broadcast.baseline import SPAN_BYTES, Baselines, write_delta
from shoal.broadcast.codec.pieces import ITEM_BYTES
from shoal.broadcast.codec.weights import Weights
from shoal.broadcast.cutter import ShardCutter
from shoal.broadcast.manifest import (
    MAX_SHARD_BYTES,
    BaseRef,
    Form,
    FormKind,
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
from shoal.broadcast.retention import needed_manifests, prune
from shoal.broadcast.store import Store, map_file
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
    bytes_total: int
    """What somebody who holds the version before downloads to follow: its delta where there is one."""
    weights_bytes: int
    kind: FormKind

    @property
    def ratio(self) -> float:
        """How many times less than the whole a follower downloads."""
        return self.weights_bytes / self.bytes_total if self.bytes_total else 1.0


@dataclass(frozen=True)
class OriginSettings:
    run_id: str = ""
    shard_bytes: int = 2 << 20
    keep_versions: int = 8
    head_ttl_s: float = 3600
    grace_s: float = 60
    """How long files of versions that left the head are still served."""
    keyframe_every: int = 8
    """Every so many versions one is published in full as well."""
    delta_from_bytes: int | None = 16 << 20
    """Smaller models are published in full only; None switches deltas off."""
    span_bytes: int = SPAN_BYTES

    def __post_init__(self) -> None:
        if not 0 < self.shard_bytes <= MAX_SHARD_BYTES:
            raise ConfigError(f"A shard of {self.shard_bytes} bytes is outside 1 … {MAX_SHARD_BYTES}.")


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
        self.store = Store(root, clock=monotonic)
        self._run_key = run_key
        self._settings = settings = settings or OriginSettings()
        self._run_id = settings.run_id or run_key.public[:16]
        self._baselines = Baselines(root / ".baselines")
        self._clock = clock
        self._lock = threading.RLock()
        self._staged: dict[int, Publication] = {}
        self._dropped_at: dict[str, float] = {}
        self.files_collected = 0
        """Shards and manifests of old versions that were removed since the start."""
        self.store.verify()
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
                return self._stage_full(version, tensors, pool)
            base = self._base()
            raw = self._baselines.temporary(version)
            keyframe = base is None or self._keyframe_due(base[1])
            entries, full = self._write_tensors(tensors, raw, pool, cut=keyframe)
            delta = self._write_delta(entries, raw, base, pool)
            if delta is None or delta.size_bytes > LARGEST_DELTA * full_bytes(entries):
                forms: tuple[Form, ...] = (full or self._cut_file(raw, pool),)
            else:
                forms = (full, delta) if full else (delta,)
            publication = self._sign(version, entries, forms)
            self._baselines.adopt(raw, publication.manifest_digest)
            return publication

    def _stage_full(self, version: int, tensors: Iterable[WireTensor], pool: ThreadPoolExecutor) -> Publication:
        """Without deltas nothing refers to a version, so no copy of it is kept."""
        entries, full = self._write_tensors(tensors, None, pool, cut=True)
        assert full is not None
        return self._sign(version, entries, (full,))

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
    ) -> tuple[list[TensorEntry], Form | None]:
        """Copy all tensors into the next baseline, if one is kept, and, for a keyframe, into shards."""
        cutter = ShardCutter(self.store, self._settings.shard_bytes, pool)
        entries = []
        with open(raw or os.devnull, "wb", buffering=0, opener=_open_to_overwrite) as file:
            for tensor in tensors:
                copied = pool.submit(write_fully, file, tensor.data)
                if cut:
                    cutter.feed(tensor.data)
                entries.append(tensor_entry(tensor))
                copied.result()
                cutter.settle()
            if raw is not None:
                file.truncate()
        return entries, Form(kind="full", shards=cutter.finish()) if cut else None

    def _write_delta(
        self, entries: list[TensorEntry], raw: Path, base: tuple[str, Manifest] | None, pool: ThreadPoolExecutor
    ) -> Form | None:
        if base is None:
            return None
        digest, manifest = base
        reference = BaseRef(version=manifest.version, manifest_digest=digest, weights_digest=manifest.weights_digest)
        new = Weights(tuple(entries), map_file(raw))
        old = self._baselines.weights(digest, manifest.tensors)
        cutter = ShardCutter(self.store, self._settings.shard_bytes, pool)
        return write_delta(old, reference, new, cutter, pool, self._settings.span_bytes)

    def _cut_file(self, raw: Path, pool: ThreadPoolExecutor) -> Form:
        cutter = ShardCutter(self.store, self._settings.shard_bytes, pool)
        cutter.feed(map_file(raw))
        return Form(kind="full", shards=cutter.finish())

    def _sign(self, version: int, entries: list[TensorEntry], forms: tuple[Form, ...]) -> Publication:
        manifest = Manifest(
            run_id=self._run_id,
            version=version,
            tensors=tuple(entries),
            weights_digest=digest_weights(entries),
            forms=forms,
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
        small = self._settings.delta_from_bytes is None or manifest.size_bytes < self._settings.delta_from_bytes
        return None if small or not self._baselines.usable(digest, manifest) else (digest, manifest)

    def _keyframe_due(self, manifest: Manifest) -> bool:
        """Whether the chain of deltas back to the last full version is as long as it may become."""
        length = 1
        while manifest.form("full") is None and length < self._settings.keyframe_every:
            delta = manifest.form("delta")
            assert delta is not None
            assert delta.base is not None
            manifest = self._manifest(delta.base.manifest_digest)
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
        try:
            return open_head((self.root / "head.json").read_bytes(), self._run_key.public)
        except FileNotFoundError:
            return None

    def _prune(self) -> None:
        assert self._head is not None
        manifests = needed_manifests((entry.manifest_digest for entry in self._head.versions), self._manifest)
        keep = set(self._files)
        self.files_collected += prune(
            self.store, manifests, keep, self._dropped_at, grace_s=self._settings.grace_s, now=self._clock()
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
    kind: FormKind = "full" if manifest.form("full") else "delta"
    smallest = min(form.size_bytes for form in manifest.forms)
    return Publication(manifest.version, digest, manifest.weights_digest, smallest, manifest.size_bytes, kind)


def full_bytes(entries: Iterable[TensorEntry]) -> int:
    return sum(entry.size_bytes for entry in entries)


def write_fully(file: RawIOBase, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while view:
        view = view[file.write(view) :]


def _open_to_overwrite(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC, 0o644)


def _worker_threads() -> int:
    return max(1, min(4, os.cpu_count() or 1))
