"""Weights that are being put together beside the live ones.

The file has its final size from the start, so a full disk shows before the first byte is fetched. Verified shards are written
in place and noted in a journal, which is how a restarted process knows what it has. Every tensor is hashed once more, as soon as
all its bytes are in the file, and only if all are right does `finish` give the file its name.
"""

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from shoal.broadcast.checking import TensorChecks
from shoal.broadcast.codec.pieces import Block, block_bytes, offsets, partition
from shoal.broadcast.codec.weights import Weights
from shoal.broadcast.manifest import Form, Manifest, ShardEntry, safetensors_header
from shoal.broadcast.store import disk_error, map_file
from shoal.files import WEIGHTS_FILE

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
        self._checks = TensorChecks(self._path, manifest)

    def missing(self) -> list[tuple[int, ShardEntry]]:
        size = os.fstat(self._journal).st_size
        journal = os.pread(self._journal, size, 0)
        whole = size - size % INDEX_BYTES
        verified = {int.from_bytes(journal[at : at + INDEX_BYTES], "little") for at in range(0, whole, INDEX_BYTES)}
        missing = []
        for index, shard in enumerate(self._form.shards):
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
        self._wrote_shard(index)

    def apply(self, base_path: Path, base: Manifest) -> None:
        """Make the weights from the base and the fetched delta, block by block on all cores."""
        from shoal.broadcast.codec.blocks import apply_block  # compiled code, needed for deltas only

        tensors = self._manifest.tensors
        old = Weights(base.tensors, map_file(base_path)[len(safetensors_header(base.tensors)) :])
        delta = map_file(self._delta_path)
        ends = list(accumulate(self._form.block_bytes))
        tensor_offsets = offsets(tensors)

        blocks = partition(tensors, self._form.span_bytes)
        largest = max((block_bytes(block) for block in blocks), default=0)
        rooms: SimpleQueue[NDArray[np.uint8]] = SimpleQueue()
        threads = os.cpu_count() or 1
        for _ in range(threads):
            rooms.put(np.empty(largest, np.uint8))

        def apply_one(number: int, block: Block) -> None:
            room = rooms.get()
            payload = delta[ends[number] - self._form.block_bytes[number] : ends[number]]
            at = len(self._header) + tensor_offsets[block[0].tensor] + block[0].start * block[0].item_bytes
            size = block_bytes(block)
            apply_block(payload, block, old, tensors, room)
            write_at(self._weights, room[:size].data, at, self._path)
            rooms.put(room)
            self._checks.wrote(at, at + size)

        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(apply_one, range(len(blocks)), blocks):
                pass

    def finish(self, target: Path) -> None:
        """Give the directory its name if all tensors are right."""
        self._checks.finish()
        self.close()
        os.replace(self._directory / "weights", target)
        shutil.rmtree(self._directory)

    def close(self) -> None:
        self._checks.close()
        while self._handles:
            os.close(self._handles.pop())

    def _wrote_shard(self, index: int) -> None:
        if self._form.kind == "full":
            start = self._shards_offset + self._offsets[index]
            self._checks.wrote(start, start + self._form.shards[index].size_bytes)

    def _open(self, path: Path, size_bytes: int | None) -> int:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._handles.append(handle)
        try:
            if size_bytes is not None:
                reserve(handle, size_bytes, path)
        except BaseException:
            os.close(self._handles.pop())
            raise
        return handle


def reserve(file: int, size_bytes: int, path: Path) -> None:
    try:
        if size_bytes:
            os.posix_fallocate(file, 0, size_bytes)
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
