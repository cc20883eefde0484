"""A version that is being put together, beside those that are in use.

The file has its final size from the start, so a full disk shows before the first byte is fetched. Verified shards are written
in place and listed in a journal, which is how a restarted process knows what it has. The digests of all tensors follow from
those of the shards that this process verified; what an earlier one wrote is read again, and what a delta makes is hashed on its
way into the file. Only if all are right does `finish` give the file its name. Files are read and written through small buffers, so
memory does not grow with the model. Any error while a delta is applied ends the apply with that error.
"""

import contextlib
import errno
import os
import shutil
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import accumulate, islice
from pathlib import Path

from blake3 import blake3

from shoal.broadcast.applying import DISK_THREADS, BlockFile, OpenWeights, aligned_buffer, apply_delta, is_large
from shoal.broadcast.codec.leaves import join_leaves, leaf_ranges
from shoal.broadcast.codec.pieces import read_at
from shoal.broadcast.manifest import (
    ALIGNMENT,
    Encoding,
    EncodingKind,
    Manifest,
    ShardEntry,
    TensorEntry,
    safetensors_header,
)
from shoal.broadcast.retention import SpareFile
from shoal.broadcast.store import DiskError, Trash, disk_error, make_directory
from shoal.errors import IntegrityError
from shoal.files import WEIGHTS_FILE, digest_bytes

JOURNAL_FILE = "verified"
INDEX_BYTES = 4
# Through a buffer that stays in the processor's cache: mapped pages would count as memory of this process.
HASH_BYTES = 256 << 10
READ_BYTES = 8 << 20


class StagedWeights:
    """`directory` holds the journal and `weights/model.safetensors` until the latter moves to its final place.

    Shards of a full encoding go straight into the weights, those of a delta into a file beside them.
    """

    def __init__(self, directory: Path, manifest: Manifest, encoding: Encoding) -> None:
        self._directory = directory
        self._manifest = manifest
        self._encoding = encoding
        self._lock = threading.Lock()
        self._offsets = [0, *accumulate(shard.size_bytes for shard in encoding.shards)]
        self._path = directory / "weights" / WEIGHTS_FILE
        self._delta_path = directory / "delta"
        self._header = safetensors_header(manifest.tensors)
        make_directory(self._path.parent)
        try:
            with ExitStack() as held:
                self._open_files(held)
                self._held = held.pop_all()
        except DiskError:
            shutil.rmtree(directory, ignore_errors=True)  # what does not fit must not fill the disk
            raise

    def _open_files(self, held: ExitStack) -> None:
        def open_file(path: Path, size_bytes: int | None) -> int:
            handle = _open_to_write(path)
            held.callback(os.close, handle)
            if size_bytes is not None:
                reserve(handle, size_bytes, path)
            return handle

        self._weights = open_file(self._path, None)
        size_bytes = len(self._header) + self._manifest.size_bytes
        if self._encoding.kind == "full" or is_large(size_bytes):
            reserve(self._weights, size_bytes, self._path)
        else:
            # It is written within seconds; where files are in memory reserving takes as long as writing.
            check_space(self._weights, size_bytes, self._path)
        self._shards, self._shards_offset = self._weights, len(self._header)
        if self._encoding.kind == "delta":
            self._shards, self._shards_offset = open_file(self._delta_path, self._encoding.size_bytes), 0
        self._journal = open_file(self._directory / JOURNAL_FILE, None)
        write_at(self._weights, memoryview(self._header), 0, self._path)
        self._checks = TensorChecks(self._weights, self._manifest)
        held.callback(self._checks.close)

    def missing(self) -> list[tuple[int, ShardEntry]]:
        verified = _journal_indexes(os.pread(self._journal, os.fstat(self._journal).st_size, 0))
        missing = []
        for index, shard in enumerate(self._encoding.shards):
            if index in verified:
                self._wrote_shard(index)
            else:
                missing.append((index, shard))
        return missing

    def write(self, index: int, data: memoryview) -> None:
        """Put a verified shard at its place."""
        write_at(self._shards, data, self._shards_offset + self._offsets[index], self._path)
        with self._lock:
            end = os.fstat(self._journal).st_size
            write_at(self._journal, memoryview(index.to_bytes(INDEX_BYTES, "little")), end, self._path)
        self._wrote_shard(index, data)

    def apply(self, base_path: Path, base: Manifest, on_block: Callable[[], None] = lambda: None) -> None:
        """Make the weights from the base and the fetched delta; every tensor is hashed on its way into the file."""
        with open_weights(base_path, base) as (file, start):
            old = OpenWeights(base_path, file, base, start)
            new = OpenWeights(self._path, self._weights, self._manifest, len(self._header))
            apply_delta(self._shards, self._encoding, old, new, on_block)

    def finish(self, target: Path, on_tensor: Callable[[], None] = lambda: None) -> None:
        """Give the directory its name if all tensors are right."""
        if self._encoding.kind == "full":
            self._checks.finish(on_tensor)
        self.close()
        os.replace(self._directory / "weights", target)
        shutil.rmtree(self._directory)

    def close(self) -> None:
        self._held.close()

    def _wrote_shard(self, index: int, data: memoryview | None = None) -> None:
        """One that an earlier process wrote is not in memory, and the disk may have lost it."""
        if self._encoding.kind == "delta":
            return
        shard, start = self._encoding.shards[index], self._shards_offset + self._offsets[index]

        def digest_part(first: int, last: int) -> str:
            assert data is not None
            return shard.digest if last - first == shard.size_bytes else digest_bytes(data[first:last])

        self._checks.wrote(start, start + shard.size_bytes, digest_part if data is not None else None)


class TensorChecks:
    """The digests of all leaves as their last bytes are written; little is left to do when the last shard arrives.

    A leaf that arrived in one shard is not read again. Safe to use from several threads; the file has its final size before
    the first byte is reported.
    """

    def __init__(self, file: int, manifest: Manifest) -> None:
        self._manifest = manifest
        self._file = file
        self._leaves = list(tensor_leaves(manifest.tensors, len(safetensors_header(manifest.tensors))))
        self._starts = [start for start, _ in self._leaves]
        self._missing = [end - start for start, end in self._leaves]
        self._digests: list[Future[str] | str] = [digest_bytes(b"")] * len(self._leaves)
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="checks")

    def wrote(self, start: int, end: int, digest_part: Callable[[int, int], str] | None = None) -> None:
        """Bytes of the file that are final now; no byte is reported twice.

        `digest_part` gives the digest of a part of them, if they are still in memory; else they are read from the file.
        """
        for number in self._completed(start, end):
            first, last = self._leaves[number]
            if digest_part is not None and start <= first and last <= end:
                self._digests[number] = digest_part(first - start, last - start)
            else:
                self._digests[number] = self._pool.submit(_digest_range, self._file, first, last)

    def finish(self, on_tensor: Callable[[], None]) -> None:
        """Raise unless every tensor is there and has its digest."""
        if any(self._missing):
            raise IntegrityError(f"Some bytes of version {self._manifest.version} never arrived.")
        digests = (one if isinstance(one, str) else one.result() for one in self._digests)
        check_tensors(self._manifest, digests, on_tensor)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _completed(self, start: int, end: int) -> list[int]:
        """The leaves whose last missing bytes these are."""
        completed = []
        with self._lock:
            number = bisect_right(self._starts, start) - 1
            while number < len(self._leaves) and self._starts[number] < end:
                first, last = self._leaves[number]
                covered = min(end, last) - max(start, first)
                if covered > 0:
                    self._missing[number] -= covered
                    if self._missing[number] == 0:
                        completed.append(number)
                number += 1
        return completed


@contextlib.contextmanager
def open_weights(path: Path, manifest: Manifest) -> Iterator[tuple[int, int]]:
    """An open safetensors file that begins with the header of this manifest and has its size, and where its tensors begin."""
    header = safetensors_header(manifest.tensors)
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        if os.fstat(file).st_size != len(header) + manifest.size_bytes or os.pread(file, len(header), 0) != header:
            raise IntegrityError(f"{path} has another header or size than version {manifest.version}.")
        yield file, len(header)
    finally:
        os.close(file)


def check_weights(path: Path, manifest: Manifest, on_tensor: Callable[[], None] = lambda: None) -> None:
    """Raise unless the file is the safetensors file of this manifest, byte for byte."""
    with open_weights(path, manifest) as (file, start), ExitStack() as held:
        source = BlockFile(path, file, direct=is_large(manifest.size_bytes))
        held.callback(source.close)
        own = threading.local()  # one buffer per thread

        def digests_of(leaves: Sequence[tuple[int, int]]) -> list[str]:
            if not hasattr(own, "buffer"):
                own.buffer = aligned_buffer(READ_BYTES + ALIGNMENT).data
            first = leaves[0][0] - leaves[0][0] % ALIGNMENT
            data: memoryview = own.buffer[: leaves[-1][1] - first]
            source.read(data, first)
            return [digest_bytes(data[begin - first : end - first]) for begin, end in leaves]

        pool = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="checks")
        held.callback(pool.shutdown, cancel_futures=True)
        found = [pool.submit(digests_of, leaves) for leaves in batched_leaves(manifest.tensors, start)]
        check_tensors(manifest, (digest for future in found for digest in future.result()), on_tensor)


def tensor_leaves(tensors: Sequence[TensorEntry], start: int) -> Iterator[tuple[int, int]]:
    """Where each leaf lies in a file whose first tensor begins at `start`."""
    for tensor in tensors:
        yield from ((start + first, start + last) for first, last in leaf_ranges(tensor.size_bytes))
        start += tensor.size_bytes


def batched_leaves(tensors: Sequence[TensorEntry], start: int) -> Iterator[list[tuple[int, int]]]:
    """As many leaves at a time as are read at once."""
    batch: list[tuple[int, int]] = []
    for begin, end in tensor_leaves(tensors, start):
        if batch and end - batch[0][0] > READ_BYTES:
            yield batch
            batch = []
        batch.append((begin, end))
    if batch:
        yield batch


def check_tensors(manifest: Manifest, digests: Iterator[str], on_tensor: Callable[[], None]) -> None:
    """Raise unless these are the digests of the leaves of all tensors."""
    for tensor in manifest.tensors:
        own = list(islice(digests, len(leaf_ranges(tensor.size_bytes))))
        if join_leaves(own) != tensor.digest:
            version = manifest.version
            raise IntegrityError(f"Tensor {tensor.name} of version {version} has another digest than promised.")
        on_tensor()


def _digest_range(file: int, start: int, end: int) -> str:
    hasher, buffer = blake3(), memoryview(bytearray(min(HASH_BYTES, end - start)))
    while start < end:
        part = buffer[: end - start]
        read_at(file, part, start)
        hasher.update(part)
        start += len(part)
    return hasher.hexdigest()


def _open_to_write(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise disk_error(error, path) from error


class StagingArea:
    """The directories of fetches under way, one per version and encoding; what no fetch continues is removed."""

    def __init__(self, root: Path, trash: Trash) -> None:
        self.root = root
        self._trash = trash
        self._spare = SpareFile(root / "spare", trash)

    def path(self, digest: str, kind: EncodingKind) -> Path:
        return self.root / f"{digest}.{kind}"

    def begin(self, manifest: Manifest, digest: str, encoding: Encoding) -> StagedWeights:
        """Go on with what an earlier fetch left here; what is new is written over the spare file, if there is one."""
        directory = self.path(digest, encoding.kind)
        make_directory(directory / "weights")
        self._spare.give(directory / "weights" / WEIGHTS_FILE)
        return self._trash.retry(lambda: StagedWeights(directory, manifest, encoding))

    def retire(self, version: Path) -> None:
        """Make a version that is kept no more the spare file; there is at most one."""
        self._spare.keep(version)

    def staged_bytes(self, digest: str, encoding: Encoding) -> int:
        """Verified bytes of an encoding that an earlier fetch left here."""
        try:
            journal = (self.path(digest, encoding.kind) / JOURNAL_FILE).read_bytes()
        except FileNotFoundError:
            return 0
        indexes = _journal_indexes(journal)
        return sum(shard.size_bytes for index, shard in enumerate(encoding.shards) if index in indexes)

    def keep_only(self, encodings: Collection[tuple[str, EncodingKind]] = ()) -> None:
        kept = {self.path(digest, kind) for digest, kind in encodings}
        for directory in set(self.root.glob("*")) - kept - {self._spare.directory}:
            self._trash.drop(directory)


def _journal_indexes(journal: bytes) -> set[int]:
    whole = len(journal) - len(journal) % INDEX_BYTES
    return {int.from_bytes(journal[at : at + INDEX_BYTES], "little") for at in range(0, whole, INDEX_BYTES)}


def reserve(file: int, size_bytes: int, path: Path) -> None:
    try:
        os.ftruncate(file, size_bytes)
        if os.fstat(file).st_blocks * 512 < size_bytes:  # one that another version left has its blocks
            os.posix_fallocate(file, 0, size_bytes)
    except OSError as error:
        raise disk_error(error, path) from error


def check_space(file: int, size_bytes: int, path: Path) -> None:
    """Set the size; DiskError if there is no room for it now."""
    try:
        disk, held_bytes = os.fstatvfs(file), os.fstat(file).st_blocks * 512
        if disk.f_bavail * disk.f_frsize + held_bytes < size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(file, size_bytes)
    except OSError as error:
        raise disk_error(error, path) from error


def write_at(file: int, data: memoryview, offset: int, path: Path) -> None:
    try:
        while data:
            written = os.pwrite(file, data, offset)
            data, offset = data[written:], offset + written
    except OSError as error:
        raise disk_error(error, path) from error
