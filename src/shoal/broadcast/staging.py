"""Weights that are being put together beside the live ones.

The file has its final size from the start, so a full disk shows before the first byte is fetched. Verified shards are written
in place and noted in a journal, which is how a restarted process knows what it has. `finish` hashes every tensor once more and
only then gives the file its name.
"""

import errno
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shoal.broadcast.manifest import Form, Manifest, ShardEntry, TensorEntry, safetensors_header
from shoal.broadcast.sources import Sources
from shoal.errors import IntegrityError, UnavailableError
from shoal.files import digest_bytes

WEIGHTS_FILE = "model.safetensors"
INDEX_BYTES = 4


class StagedWeights:
    """`directory` holds the journal and `weights/model.safetensors` until the latter moves to its final place."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory = directory
        self._manifest = manifest
        self._lock = threading.Lock()
        header = safetensors_header(manifest.tensors)
        self.data_offset = len(header)
        (directory / "weights").mkdir(parents=True, exist_ok=True)
        self.path = directory / "weights" / WEIGHTS_FILE
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            reserve(self._file, self.data_offset + manifest.size_bytes, self.path)
            os.pwrite(self._file, header, 0)
            self._journal = os.open(directory / "verified", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except BaseException:
            os.close(self._file)
            raise

    def missing(self, form: Form) -> list[tuple[int, ShardEntry]]:
        size = os.fstat(self._journal).st_size
        journal = os.pread(self._journal, size, 0)
        whole = size - size % INDEX_BYTES
        verified = {int.from_bytes(journal[at : at + INDEX_BYTES], "little") for at in range(0, whole, INDEX_BYTES)}
        return [(index, shard) for index, shard in enumerate(form.shards) if index not in verified]

    def write(self, index: int, offset: int, data: memoryview) -> None:
        """Put a verified shard at its place in the stream of tensors."""
        write_at(self._file, data, self.data_offset + offset, self.path)
        with self._lock:
            write_all(self._journal, index.to_bytes(INDEX_BYTES, "little"), self.path)

    def finish(self, target: Path) -> None:
        """Check all tensors and give the directory its name."""
        check_weights(self.path, self._manifest)
        self.close()
        os.replace(self._directory / "weights", target)
        shutil.rmtree(self._directory)

    def close(self) -> None:
        for handle in (self._file, self._journal):
            if handle >= 0:
                os.close(handle)
        self._file = self._journal = -1


def check_weights(path: Path, manifest: Manifest) -> None:
    """Raise unless the file is the safetensors file of this manifest, byte for byte."""
    header = safetensors_header(manifest.tensors)
    if path.stat().st_size != len(header) + manifest.size_bytes:
        raise IntegrityError(f"{path} does not have the size of version {manifest.version}.")
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
        ThreadPoolExecutor(os.cpu_count() or 1) as pool,
    ):
        if view[: len(header)] != header:
            raise IntegrityError(f"{path} does not have the header of version {manifest.version}.")
        slices = tensor_slices(manifest.tensors, len(header))
        wrong = [name for name in pool.map(lambda item: _wrong_tensor(view, *item), slices) if name]
    if wrong:
        raise IntegrityError(f"Tensor {wrong[0]} of version {manifest.version} has another digest than promised.")


def tensor_slices(tensors: Iterable[TensorEntry], start: int) -> list[tuple[TensorEntry, int, int]]:
    """Where each tensor lies in a file whose first tensor begins at `start`."""
    slices = []
    for tensor in tensors:
        end = start + tensor.size_bytes
        slices.append((tensor, start, end))
        start = end
    return slices


def fetch_all(
    sources: Sources,
    wanted: Sequence[tuple[int, ShardEntry]],
    sink: Callable[[int, memoryview], None],
    *,
    connections: int,
    deadline: float,
) -> None:
    """Fetch shards over several connections at once and hand each to `sink`; the first error ends it all."""
    queue = iter(wanted)
    lock = threading.Lock()
    failed = threading.Event()

    def work() -> None:
        try:
            while not failed.is_set():
                with lock:
                    item = next(queue, None)
                if item is None:
                    return
                sink(item[0], sources.shard(item[1], deadline=deadline))
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(connections, thread_name_prefix="shards") as pool:
        for worker in [pool.submit(work) for _ in range(min(connections, len(wanted)))]:
            worker.result()


def reserve(file: int, size_bytes: int, path: Path) -> None:
    try:
        os.posix_fallocate(file, 0, size_bytes)
        os.ftruncate(file, size_bytes)
    except OSError as error:
        raise _disk_error(error, path) from error


def write_at(file: int, data: memoryview, offset: int, path: Path) -> None:
    try:
        while data:
            written = os.pwrite(file, data, offset)
            data, offset = data[written:], offset + written
    except OSError as error:
        raise _disk_error(error, path) from error


def write_all(file: int, data: bytes, path: Path) -> None:
    try:
        os.write(file, data)
    except OSError as error:
        raise _disk_error(error, path) from error


def _disk_error(error: OSError, path: Path) -> UnavailableError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UnavailableError(
            f"There is no room on the disk for {path}.", hint="Free some space, or name another directory."
        )
    return UnavailableError(f"{path} cannot be written: {error.strerror}.")


def _wrong_tensor(view: memoryview, tensor: TensorEntry, start: int, end: int) -> str:
    return "" if digest_bytes(view[start:end]) == tensor.digest else tensor.name
