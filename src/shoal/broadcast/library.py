"""Manifests on disk, fetched when missing; signature and digest are checked every time one is opened."""

from collections.abc import Callable, Sequence

from shoal.broadcast.manifest import Manifest, open_manifest
from shoal.broadcast.peers import ABSENT_AFTER_S, Sources
from shoal.broadcast.store import Store
from shoal.files import digest_bytes


class Library:
    def __init__(
        self, store: Store, sources: Sources, run_key: str, *, among: Callable[[], Sequence[str]] | None = None
    ) -> None:
        """`among` names whom to ask, if not everybody."""
        self._among = among
        self._store = store
        self._sources = sources
        self._run_key = run_key

    def manifest(self, digest: str, *, deadline: float, absent_after_s: float = ABSENT_AFTER_S) -> Manifest:
        kept = self._kept(digest)
        if kept is not None:
            return open_manifest(kept, self._run_key)
        manifest, data = self._sources.manifest(
            digest, self._run_key, deadline=deadline, absent_after_s=absent_after_s, among=self._among
        )
        self._store.put("manifests", data, digest)
        return manifest

    def _kept(self, digest: str) -> bytes | None:
        if not self._store.has("manifests", digest):
            return None
        data = self._store.read("manifests", digest)
        if digest_bytes(data) == digest:
            return data
        self._store.remove("manifests", [digest])
        return None
