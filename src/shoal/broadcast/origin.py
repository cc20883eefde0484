"""The publisher: turns tensors into signed, content-addressed files and moves the one pointer to them.

`stage` writes shards and manifest of a version; nobody can see them until `announce` replaces head.json. A version number
that was announced keeps its bytes for ever: staging it again with the same weights is free, with others it is refused.
Any step may be killed and repeated; a restarted origin drops damaged files and goes on from the head it finds.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shoal.broadcast.cutter import ShardCutter
from shoal.broadcast.manifest import (
    ITEM_BYTES,
    MAX_SHARD_BYTES,
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
from shoal.broadcast.store import Readers, Store
from shoal.errors import ConfigError, IntegrityError
from shoal.files import digest_bytes, write_atomic
from shoal.identity import Keypair


@dataclass(frozen=True)
class Publication:
    version: int
    manifest_digest: str
    weights_digest: str
    bytes_total: int
    kind: FormKind


class Origin:
    """One per run; the trainer's process owns the directory. Safe to call from several threads."""

    def __init__(
        self,
        root: Path,
        run_key: Keypair,
        *,
        run_id: str = "",
        shard_bytes: int = 2 << 20,
        keep_versions: int = 8,
        head_ttl_s: float = 3600,
        grace_s: float = 60,
        readers: Readers | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not 0 < shard_bytes <= MAX_SHARD_BYTES:
            raise ConfigError(f"A shard of {shard_bytes} bytes is outside 1 … {MAX_SHARD_BYTES}.")
        self.root = root
        self.store = Store(root)
        self._run_key = run_key
        self._run_id = run_id or run_key.public[:16]
        self._shard_bytes = shard_bytes
        self._keep_versions = keep_versions
        self._head_ttl_s = head_ttl_s
        self._grace_s = grace_s
        self.readers = readers or Readers()
        self._clock = clock
        self._lock = threading.RLock()
        self._staged: dict[int, Publication] = {}
        self._dropped_at: dict[str, float] = {}
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

    def write_descriptor(self, envelope: bytes) -> None:
        write_atomic(self.root / "descriptor.json", envelope)

    def stage(self, version: int, tensors: Iterable[WireTensor]) -> Publication:
        """Write a version's files without showing them to anybody yet."""
        with self._lock, ThreadPoolExecutor(_writer_threads()) as pool:
            known = self._announced(version)
            if known is not None:
                return _same_weights(known, tensors)
            entries, form = self._write_full(tensors, pool)
            manifest = Manifest(
                run_id=self._run_id,
                version=version,
                tensors=tuple(entries),
                weights_digest=digest_weights(entries),
                forms=(form,),
            )
            digest = self.store.put("manifests", seal_manifest(manifest, self._run_key))
            self._staged[version] = _describe(manifest, digest)
            return self._staged[version]

    def announce(self, *, ledger_head: str) -> Head:
        """Show all staged versions at once, then delete what nobody needs any more."""
        with self._lock:
            entries = {entry.version: entry for entry in (self._head.versions if self._head else ())}
            for version, publication in self._staged.items():
                entries[version] = VersionEntry(version=version, manifest_digest=publication.manifest_digest)
            kept = sorted(entries.values(), key=lambda entry: entry.version)[-self._keep_versions :]
            head = self._write_head(tuple(kept), ledger_head)
            self._staged.clear()
            self._prune()
            return head

    def refresh(self) -> None:
        """Sign the head again when half of its life has passed, so that a slow step does not look like a frozen swarm."""
        with self._lock:
            if self._head is not None and self._head.expires_at - self._clock() < self._head_ttl_s / 2:
                self._write_head(self._head.versions, self._head.ledger_head)

    def _write_full(self, tensors: Iterable[WireTensor], pool: ThreadPoolExecutor) -> tuple[list[TensorEntry], Form]:
        cutter = ShardCutter(self.store, self._shard_bytes, pool)
        entries = []
        for tensor in tensors:
            cutter.feed(tensor.data)
            entries.append(tensor_entry(tensor))
            cutter.settle()
        return entries, Form(kind="full", shards=cutter.finish())

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
            expires_at=self._clock() + self._head_ttl_s,
            ledger_head=ledger_head,
            versions=versions,
            files=tuple(self._files.values()),
        )
        write_atomic(self.root / "head.json", seal_head(head, self._run_key))
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
        prune(self.store, manifests, keep, self.readers, self._dropped_at, grace_s=self._grace_s, now=self._clock())


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
    return Publication(manifest.version, digest, manifest.weights_digest, manifest.size_bytes, kind)


def _writer_threads() -> int:
    return max(1, min(4, os.cpu_count() or 1))
