"""Weights that are being put together beside the live ones.

The file has its final size from the start, so a full disk shows before the first byte is fetched. Verified shards are written
in place and noted in a journal, which is how a restarted process knows what it has. `finish` hashes every tensor once more and
only then gives the file its name.
"""

import errno
import os
import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

from shoal.broadcast.manifest import Form, Manifest, ShardEntry, TensorEntry, safetensors_header
from shoal.broadcast.pieces import Block, offsets, partition
from shoal.broadcast.store import map_file
from shoal.broadcast.weights import Weights
from shoal.errors import IntegrityError, UnavailableError
from shoal.files import digest_bytes

WEIGHTS_FILE = "model.safetensors"
INDEX_BYTES = 4


class StagedWeights:
    """`directory` holds the journal and `weights/model.safetensors` until the latter moves to its final place.

    Shards of a full form go straight into the weights, those of a delta into a file beside them.
    """

    def __init__(self, directory: Path, manifest: Manifest, form: Form) -> None:
        self._directory = directory
        self._manifest = manifest
        self._form = form
        self._lock = threading.Lock()
        self._handles: list[int] = []
        self._offsets = [0, *accumulate(shard.size_bytes for shard in form.shards)]
        self._path = directory / "weights" / WEIGHTS_FILE
        self._delta_path = directory / "delta"
        self._header = safetensors_header(manifest.tensors)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._weights = self._open(self._path, len(self._header) + manifest.size_bytes)
        self._shards, self._shards_offset = self._weights, len(self._header)
        if form.kind == "delta":
            self._shards, self._shards_offset = self._open(self._delta_path, form.size_bytes), 0
        self._journal = self._open(directory / "verified", None)
        write_at(self._weights, memoryview(self._header), 0, self._path)

    def missing(self) -> list[tuple[int, ShardEntry]]:
        size = os.fstat(self._journal).st_size
        journal = os.pread(self._journal, size, 0)
        whole = size - size % INDEX_BYTES
        verified = {int.from_bytes(journal[at : at + INDEX_BYTES], "little") for at in range(0, whole, INDEX_BYTES)}
        return [(index, shard) for index, shard in enumerate(self._form.shards) if index not in verified]

    def write(self, index: int, data: memoryview) -> None:
        """Put a verified shard at its place."""
        write_at(self._shards, data, self._shards_offset + self._offsets[index], self._path)
        with self._lock:
            end = os.fstat(self._journal).st_size
            write_at(self._journal, memoryview(index.to_bytes(INDEX_BYTES, "little")), end, self._path)

    def apply(self, base_path: Path, base: Manifest) -> None:
        """Make the weights from the base and the fetched delta, block by block on all cores."""
        from shoal.broadcast.blocks import apply_block  # compiled code, needed for deltas only

        tensors = self._manifest.tensors
        old = Weights(base.tensors, map_file(base_path)[len(safetensors_header(base.tensors)) :])
        delta = map_file(self._delta_path)
        ends = list(accumulate(self._form.block_bytes))
        tensor_offsets = offsets(tensors)

        def apply_one(number: int, block: Block) -> None:
            payload = delta[ends[number] - self._form.block_bytes[number] : ends[number]]
            at = len(self._header) + tensor_offsets[block[0].tensor] + block[0].start * block[0].item_bytes
            for numbers in apply_block(payload, block, old, tensors):
                write_at(self._weights, numbers.data.cast("B"), at, self._path)
                at += numbers.nbytes

        blocks = partition(tensors, self._form.span_bytes)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for _ in pool.map(apply_one, range(len(blocks)), blocks):
                pass

    def finish(self, target: Path) -> None:
        """Check all tensors and give the directory its name."""
        check_weights(self._path, self._manifest)
        self.close()
        os.replace(self._directory / "weights", target)
        shutil.rmtree(self._directory)

    def close(self) -> None:
        while self._handles:
            os.close(self._handles.pop())

    def _open(self, path: Path, size_bytes: int | None) -> int:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._handles.append(handle)
        try:
            if size_bytes is not None:
                reserve(handle, size_bytes, path)
        except BaseException:
            self.close()
            raise
        return handle


def check_weights(path: Path, manifest: Manifest) -> None:
    """Raise unless the file is the safetensors file of this manifest, byte for byte."""
    header = safetensors_header(manifest.tensors)
    if path.stat().st_size != len(header) + manifest.size_bytes:
        raise IntegrityError(f"{path} does not have the size of version {manifest.version}.")
    view = map_file(path)
    if view[: len(header)] != header:
        raise IntegrityError(f"{path} does not have the header of version {manifest.version}.")
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
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


def reserve(file: int, size_bytes: int, path: Path) -> None:
    try:
        if size_bytes:
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


def _disk_error(error: OSError, path: Path) -> UnavailableError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UnavailableError(
            f"There is no room on the disk for {path}.", hint="Free some space, or name another directory."
        )
    return UnavailableError(f"{path} cannot be written: {error.strerror}.")


def _wrong_tensor(view: memoryview, tensor: TensorEntry, start: int, end: int) -> str:
    return "" if digest_bytes(view[start:end]) == tensor.digest else tensor.name
