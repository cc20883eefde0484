"""New weights from old ones and a delta: each byte is read once, written once, and hashed in memory before it counts.

Blocks are made on several threads, a few ahead, and hashed in order. A file that is large for this machine passes the page cache
by: the cache could not keep it, and filling it drives out what others use. On a virtual machine whose host takes free memory back,
new pages of the cache cost several times what reading and writing the disk does.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from shoal.broadcast.codec.leaves import TensorHasher
from shoal.broadcast.codec.pieces import (
    Base,
    Block,
    Bytes,
    InPlace,
    TensorFile,
    block_bytes,
    outline,
    partition,
    read_at,
)
from shoal.broadcast.manifest import ALIGNMENT, Encoding, Manifest, TensorEntry
from shoal.broadcast.store import disk_error
from shoal.errors import IntegrityError

LARGE_SHARE = 0.25
"""Of this machine's memory: a file above that is not kept in the page cache."""
BLOCKS_AHEAD = 2
# More than cores, so that the disk reads and writes while blocks are made; few, because each has a block in memory.
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


class Hashed:
    """The tensors of a version as they pass, in order; the first that has another digest than promised is refused."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._hasher = TensorHasher()

    def take(self, block: Block, data: Bytes) -> None:
        at = 0
        for piece in block:
            tensor = self._manifest.tensors[piece.tensor]
            if piece.start == 0:
                self._hasher = TensorHasher()
            self._hasher.update(data[at : at + piece.size_bytes].data)
            at += piece.size_bytes
            if (piece.start + piece.count) * piece.item_bytes == tensor.size_bytes:
                self._compare(tensor)

    def _compare(self, tensor: TensorEntry) -> None:
        if self._hasher.hexdigest() != tensor.digest:
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
    manifest, hashed = new.manifest, Hashed(new.manifest)
    blocks = partition(manifest.tensors, encoding.span_bytes)
    ends, delta_ends = (list(accumulate(sizes)) for sizes in (map(block_bytes, blocks), encoding.block_bytes))
    with ExitStack() as held:
        direct = is_large(manifest.size_bytes)
        source, sink = (BlockFile(one.path, one.file, direct=direct) for one in (old, new))
        held.callback(source.close)
        held.callback(sink.close)
        base = _base(source, old, manifest)

        def make(number: int, buffer: Bytes) -> Bytes:
            from shoal.broadcast.codec.blocks import apply_block  # compiled code, needed for deltas only

            block, size = blocks[number], block_bytes(blocks[number])
            payload = memoryview(bytearray(encoding.block_bytes[number]))
            read_at(delta, payload, delta_ends[number] - len(payload))
            start = ends[number] - size
            apply_block(payload, block, base(buffer[:size], start), manifest.tensors, buffer)
            sink.write(buffer[:size].data, new.start + start)
            return buffer

        threads = DISK_THREADS if direct else os.cpu_count() or 1
        with closing(_in_order(make, len(blocks), max(map(block_bytes, blocks), default=0), threads)) as made:
            for number, buffer in made:
                hashed.take(blocks[number], buffer)
                on_block()


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


def _in_order(
    make: Callable[[int, Bytes], Bytes], count: int, largest: int, threads: int
) -> Generator[tuple[int, Bytes], None, None]:
    """What is made on several threads, one after the other; each is valid until the next is asked for."""
    pending: deque[Future[Bytes]] = deque()
    free = [aligned_buffer(largest) for _ in range(min(count, threads + BLOCKS_AHEAD))]
    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
        try:
            started = 0
            for number in range(count):
                while free and started < count:
                    pending.append(pool.submit(make, started, free.pop()))
                    started += 1
                buffer = pending.popleft().result()
                yield number, buffer
                free.append(buffer)
        finally:
            for future in pending:
                future.cancel()


def aligned_buffer(size_bytes: int) -> Bytes:
    """Memory of whole pages, as a disk without a cache in between needs it; of large ones if the system has them.

    Small new pages cost more than filling them: 49,000 of them were a fifth of the time of a delta of 512 MB.
    """
    memory = mmap.mmap(-1, max(size_bytes, 1))
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
