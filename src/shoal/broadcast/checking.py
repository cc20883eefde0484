"""Whether a safetensors file holds exactly the tensors that its manifest promises.

`TensorChecks` hashes each tensor from the file as soon as the last of its bytes was written, so that nothing is left to do when
the last shard arrives; `check_weights` looks at a file that somebody else wrote.
"""

import os
import threading
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from shoal.broadcast.manifest import Manifest, TensorEntry, safetensors_header
from shoal.broadcast.store import map_file
from shoal.errors import IntegrityError
from shoal.files import digest_bytes


class TensorChecks:
    """Safe to use from several threads; the file has its final size before the first byte is reported."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._manifest = manifest
        self._view = map_file(path)
        self._slices = tensor_slices(manifest.tensors, len(safetensors_header(manifest.tensors)))
        self._starts = [start for _, start, _ in self._slices]
        self._missing = [end - start for _, start, end in self._slices]
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="checks")
        self._found: list[Future[str]] = []

    def wrote(self, start: int, end: int) -> None:
        """Bytes of the file that are final now; nobody reports a byte twice."""
        with self._lock:
            number = bisect_right(self._starts, start) - 1
            while number < len(self._slices) and self._slices[number][1] < end:
                tensor, first, last = self._slices[number]
                covered = min(end, last) - max(start, first)
                if covered > 0:
                    self._missing[number] -= covered
                    if self._missing[number] == 0:
                        self._found.append(self._pool.submit(_wrong_tensor, self._view, tensor, first, last))
                number += 1

    def finish(self) -> None:
        """Raise unless every tensor is there and has its digest."""
        if any(self._missing):
            raise IntegrityError(f"Some bytes of version {self._manifest.version} never arrived.")
        _refuse(self._manifest, [wrong for future in self._found if (wrong := future.result())])

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


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
        _refuse(manifest, [wrong for wrong in pool.map(lambda item: _wrong_tensor(view, *item), slices) if wrong])


def tensor_slices(tensors: Sequence[TensorEntry], start: int) -> list[tuple[TensorEntry, int, int]]:
    """Where each tensor lies in a file whose first tensor begins at `start`."""
    slices = []
    for tensor in tensors:
        end = start + tensor.size_bytes
        slices.append((tensor, start, end))
        start = end
    return slices


def _wrong_tensor(view: memoryview, tensor: TensorEntry, start: int, end: int) -> str:
    return "" if digest_bytes(view[start:end]) == tensor.digest else tensor.name


def _refuse(manifest: Manifest, wrong: list[str]) -> None:
    if wrong:
        raise IntegrityError(f"Tensor {wrong[0]} of version {manifest.version} has another digest than promised.")
