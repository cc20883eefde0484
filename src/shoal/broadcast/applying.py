"""New weights from old ones and a delta: each byte is read once, written once, and hashed in memory before it counts.

Blocks are made on several threads, a few ahead. Each passes in windows that stay in the processor's cache while they are read,
changed, hashed and written; a leaf that two blocks share is finished in order. A file that is large for this machine passes the
page cache by: the cache could not keep it, and filling it drives out what others use. On a virtual machine whose host takes free
memory back, new pages of the cache cost several times what reading and writing the disk does.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import numpy as np

from shoal.broadcast.codec.leaves import LeafChain, RunHasher, join_leaves, leaf_ranges
from shoal.broadcast.codec.pieces import (
    Base,
    Block,
    Bytes,
    InPlace,
    TensorFile,
    block_bytes,
    cut,
    outline,
    partition,
    read_at,
)
from shoal.broadcast.manifest import ALIGNMENT, Encoding, Manifest, TensorEntry
from shoal.broadcast.store import disk_error
from shoal.errors import IntegrityError

T = TypeVar("T")

LARGE_SHARE = 0.25
"""Of this machine's memory: a file above that is not kept in the page cache."""
BLOCKS_AHEAD = 2
WINDOW_BYTES = 512 << 10
"""Stays in a core's cache while it is read, changed, hashed and written."""
DISK_WINDOW_BYTES = 8 << 20
"""Of a large file: a disk answers few large requests faster than many small ones."""
# More than cores, so that the disk reads and writes while blocks are made; few, because each has a delta in memory.
DISK_THREADS = min(os.cpu_count() or 1, 6) + 2


class BlockFile:
    """An open file of weights; aligned blocks pass the page cache by if `direct` and if the file system lets them.

    A block shares no page with one that is not aligned, so both kinds may be written at the same time.
    """

    def __init__(self, path: Path, file: int, *, direct: bool) -> None:
        self._path, self._file = path, file
        self._direct = _open_direct(path, file) if direct else None

    def read(self, out: memoryview, offset: int) -> None:
        whole = out[: len(out) - len(out) % ALIGNMENT]
        done = self._around_cache(lambda file: os.preadv(file, [whole], offset), len(whole), offset)
        read_at(self._file, out[done:], offset + done)

    def write(self, data: memoryview, offset: int) -> None:
        try:
            done = self._around_cache(lambda file: os.pwrite(file, data, offset), len(data), offset)
            while done < len(data):
                done += os.pwrite(self._file, data[done:], offset + done)
        except OSError as error:
            raise disk_error(error, self._path) from error

    def close(self) -> None:
        if self._direct is not None:
            os.close(self._direct)

    def _around_cache(self, act: Callable[[int], int], size_bytes: int, offset: int) -> int:
        """How many bytes that did; 0 where the cache has to be used."""
        if self._direct is None or not size_bytes or offset % ALIGNMENT or size_bytes % ALIGNMENT:
            return 0
        try:
            return act(self._direct)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a device with larger sectors
                raise
            return 0


class CheckedTensors:
    """The tensors of a version as they pass, in order; the first that has another digest than promised is refused."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._chain = LeafChain()
        self._digests: list[str] = []
        """Of the leaves of the tensor that is passing."""

    def take(self, block: Block, run: RunHasher) -> None:
        """The next block, which was hashed by itself."""
        self._digests += self._chain.take(run)
        for piece in block:
            tensor = self._manifest.tensors[piece.tensor]
            if (piece.start + piece.count) * piece.item_bytes == tensor.size_bytes:
                count = len(leaf_ranges(tensor.size_bytes))
                self._compare(tensor, self._digests[:count])
                self._digests = self._digests[count:]

    def _compare(self, tensor: TensorEntry, digests: list[str]) -> None:
        if join_leaves(digests) != tensor.digest:
            version = self._manifest.version
            raise IntegrityError(f"Tensor {tensor.name} of version {version} has another digest than promised.")


@dataclass(frozen=True)
class OpenWeights:
    path: Path
    file: int
    manifest: Manifest
    start: int
    """Where the first tensor begins."""


def apply_delta(
    delta: int, encoding: Encoding, old: OpenWeights, new: OpenWeights, on_block: Callable[[], None] = lambda: None
) -> None:
    """Fill the new file from the old one and the bytes of the encoding, which the open file `delta` holds."""
    manifest, checked = new.manifest, CheckedTensors(new.manifest)
    blocks = partition(manifest.tensors, encoding.span_bytes)
    with ExitStack() as held:
        maker = held.enter_context(closing(BlockMaker(delta, encoding, blocks, old, new)))
        for number, run in held.enter_context(closing(_in_order(maker.make, len(blocks), maker.threads))):
            checked.take(blocks[number], run)
            on_block()


class BlockMaker:
    """Makes blocks of a version, each on any thread: its bytes are in the new file when `make` returns their digests."""

    def __init__(
        self, delta: int, encoding: Encoding, blocks: Sequence[Block], old: OpenWeights, new: OpenWeights
    ) -> None:
        direct = is_large(new.manifest.size_bytes)
        self.threads = DISK_THREADS if direct else os.cpu_count() or 1
        self._window_bytes = DISK_WINDOW_BYTES if direct else WINDOW_BYTES
        self._delta, self._delta_sizes = delta, encoding.block_bytes
        self._delta_ends = list(accumulate(encoding.block_bytes))
        self._blocks, self._ends = blocks, list(accumulate(map(block_bytes, blocks)))
        self._new_start, self._tensors = new.start, new.manifest.tensors
        self._source, self._sink = (BlockFile(one.path, one.file, direct=direct) for one in (old, new))
        self._base = _base(self._source, old, new.manifest)
        self._own = threading.local()  # one buffer per thread

    def make(self, number: int) -> RunHasher:
        from shoal.broadcast.codec.blocks import BlockDelta  # compiled code, needed for deltas only

        block = self._blocks[number]
        payload = memoryview(bytearray(self._delta_sizes[number]))
        read_at(self._delta, payload, self._delta_ends[number] - len(payload))
        delta, run = BlockDelta(payload, block, self._tensors), RunHasher()
        at = self._ends[number] - block_bytes(block)
        for window in cut(block, self._window_bytes):
            data = self._buffer()[: block_bytes(window)]
            delta.apply(window, self._base(data, at), data)
            self._hash(window, data, run)
            self._sink.write(data.data, self._new_start + at)
            at += len(data)
        delta.finish()
        return run

    def close(self) -> None:
        self._source.close()
        self._sink.close()

    def _hash(self, window: Block, data: Bytes, run: RunHasher) -> None:
        at = 0
        for piece in window:
            part = data[at : at + piece.size_bytes].data
            run.update(part, piece.start * piece.item_bytes, self._tensors[piece.tensor].size_bytes)
            at += piece.size_bytes

    def _buffer(self) -> Bytes:
        if not hasattr(self._own, "buffer"):
            largest = max(map(block_bytes, self._blocks))
            self._own.buffer = aligned_buffer(min(self._window_bytes, largest))
        buffer: Bytes = self._own.buffer
        return buffer


def is_large(size_bytes: int) -> bool:
    return size_bytes > LARGE_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _base(file: BlockFile, old: OpenWeights, manifest: Manifest) -> Callable[[Bytes, int], Base]:
    """What the base of a block is, for a buffer and the place of the block: read at once where all tensors are the same."""
    if outline(old.manifest.tensors) != outline(manifest.tensors):
        return lambda buffer, at: TensorFile(old.manifest.tensors, old.file, old.start)

    def read(buffer: Bytes, at: int) -> Base:
        file.read(buffer.data, old.start + at)
        return InPlace()

    return read


def _in_order(make: Callable[[int], T], count: int, threads: int) -> Generator[tuple[int, T], None, None]:
    """What is made on several threads, a few ahead, one after the other."""
    pending: deque[Future[T]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
        try:
            started = 0
            for number in range(count):
                while started < min(count, number + threads + BLOCKS_AHEAD):
                    pending.append(pool.submit(make, started))
                    started += 1
                yield number, pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def aligned_buffer(size_bytes: int) -> Bytes:
    """Memory of whole pages, as a disk without a cache in between needs it; of large ones if the system has them.

    A request to the disk is cut where pages are not neighbours: with small ones reading took three times as long.
    """
    # Shared memory, the default, gets small pages on most systems.
    memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # built without
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _open_direct(path: Path, file: int) -> int | None:
    """None where the system or the file system has no such requests."""
    flag: int | None = getattr(os, "O_DIRECT", None)  # Linux; macOS has none
    if flag is None:
        return None
    try:
        return os.open(path, fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE | flag)
    except OSError:
        return None
