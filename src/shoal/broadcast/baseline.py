"""The publisher's copy of what it published last: the base of the next delta.

Raw tensor bytes in one file per version, written while a version is staged and kept only once it is announced: a delta against
an invisible version would be useless. A file found after a restart is used only if it still has its digests. The file before the
last is overwritten by the next one, which costs a third of what new pages do.
"""

import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from shoal.broadcast.codec.pieces import TensorBits, partition
from shoal.broadcast.manifest import BaseRef, Encoding, Manifest, TensorEntry
from shoal.broadcast.store import ShardCutter, map_file
from shoal.files import digest_bytes

SPAN_BYTES = 32 << 20
BLOCKS_AHEAD = 4


class Baselines:
    """One `<manifest digest>.raw` per version that a delta may still refer to."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._spare = directory / "spare.raw"
        self._sound: set[str] = set()
        directory.mkdir(parents=True, exist_ok=True)

    def path(self, digest: str) -> Path:
        return self._directory / f"{digest}.raw"

    def temporary(self, version: int) -> Path:
        """A file to write the next version into, with any content."""
        path = self._directory / f"staging-{version}.tmp"
        if self._spare.exists():
            os.replace(self._spare, path)
        return path

    def adopt(self, temporary: Path, digest: str) -> None:
        os.replace(temporary, self.path(digest))
        self._sound.add(digest)

    def usable(self, digest: str, manifest: Manifest) -> bool:
        """Whether the version's bytes are here; checked once per process."""
        if digest not in self._sound and self._matches(digest, manifest):
            self._sound.add(digest)
        return digest in self._sound

    def bits(self, digest: str, tensors: tuple[TensorEntry, ...]) -> TensorBits:
        return TensorBits(tensors, map_file(self.path(digest)))

    def keep_only(self, digests: Iterable[str]) -> None:
        keep = set(digests)
        for path in list(self._directory.iterdir()):
            if path.stem not in keep and path != self._spare:
                os.replace(path, self._spare)
        self._sound &= keep

    def _matches(self, digest: str, manifest: Manifest) -> bool:
        path = self.path(digest)
        if not path.exists() or path.stat().st_size != manifest.size_bytes:
            return False
        view, at = map_file(path), 0
        for tensor in manifest.tensors:
            if digest_bytes(view[at : at + tensor.size_bytes]) != tensor.digest:
                return False
            at += tensor.size_bytes
        return True


def write_delta(
    base: TensorBits, base_ref: BaseRef, new: TensorBits, cutter: ShardCutter, pool: ThreadPoolExecutor, span_bytes: int
) -> Encoding:
    """Encode block after block on the pool, a few ahead, and cut the results into shards in order."""
    from shoal.broadcast.codec.blocks import encode_block  # compiled code, needed for deltas only

    sizes: list[int] = []
    pending: deque[Future[bytes]] = deque()

    def take_one() -> None:
        payload = pending.popleft().result()
        sizes.append(len(payload))
        cutter.feed(payload)

    for block in partition(new.tensors, span_bytes):
        if len(pending) >= BLOCKS_AHEAD:
            take_one()
        pending.append(pool.submit(encode_block, block, base, new))
    while pending:
        take_one()
    return Encoding(
        kind="delta", base=base_ref, shards=cutter.finish(), span_bytes=span_bytes, block_bytes=tuple(sizes)
    )
