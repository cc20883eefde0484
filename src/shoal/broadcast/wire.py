"""Tensors as the publisher hands them over: checked before anything is written, seen as plain bytes, hashed once.

A tensor that cannot travel is refused with its name and what to do: a name that a reader would not accept, a type that the wire
does not know, bytes that are not its shape's or do not lie in one piece. Data may be any buffer; it must not change meanwhile.
"""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from pydantic import ValidationError

from shoal.broadcast.codec.leaves import digest_tensor, join_leaves, leaf_ranges
from shoal.broadcast.codec.pieces import ITEM_BYTES, Bits, Piece, storage_of
from shoal.broadcast.manifest import TensorEntry, WireTensor
from shoal.errors import ShoalError
from shoal.files import digest_bytes

UNKNOWN_DIGEST = "0" * 64
RESERVED_NAME = "__metadata__"


class TensorError(ShoalError):
    """A tensor that cannot be published."""

    code = "tensor"
    permanent = True


def check_tensors(tensors: Iterable[WireTensor]) -> list[WireTensor]:
    """The tensors with their data as flat bytes; TensorError if one of them cannot travel."""
    checked = [replace(tensor, data=flat_bytes(tensor)) for tensor in tensors]
    names: set[str] = {RESERVED_NAME}
    for tensor in checked:
        _describe(tensor, UNKNOWN_DIGEST)
        if tensor.name in names:
            raise TensorError(
                f"There are two tensors {tensor.name!r}, or the name is reserved.",
                hint="Give every tensor its own name.",
            )
        names.add(tensor.name)
    return checked


def tensor_entry(tensor: WireTensor) -> TensorEntry:
    """The manifest line of a tensor whose bytes really have the size that its shape claims."""
    return _describe(tensor, digest_tensor(flat_bytes(tensor)))


def flat_bytes(tensor: WireTensor) -> memoryview:
    """The data of any number of dimensions, none included, as one row of bytes."""
    view = memoryview(tensor.data)
    if view.nbytes == 0:
        return memoryview(b"")
    if not view.c_contiguous:
        raise TensorError(
            f"The bytes of tensor {tensor.name!r} do not lie in one piece.",
            hint="Publish a contiguous copy of it: tensor.contiguous() or numpy.ascontiguousarray().",
        )
    return view.cast("B")


def _describe(tensor: WireTensor, digest: str) -> TensorEntry:
    if tensor.dtype not in ITEM_BYTES:
        raise TensorError(
            f"Tensor {tensor.name!r} has dtype {tensor.dtype}.", hint=f"The wire knows {', '.join(ITEM_BYTES)}."
        )
    size_bytes = memoryview(tensor.data).nbytes
    if size_bytes != math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]:
        raise TensorError(
            f"Tensor {tensor.name!r} has {size_bytes} bytes, its shape {tensor.shape} and dtype {tensor.dtype} say otherwise.",
            hint="Hand over exactly the bytes of its numbers.",
        )
    fields = {"name": tensor.name, "dtype": tensor.dtype, "shape": tensor.shape, "digest": digest}
    try:
        return TensorEntry.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise TensorError(
            f"Tensor {str(tensor.name)[:80]!r} cannot be published: its {first['loc'][0]} is not allowed ({first['msg']}).",
            hint="A name has up to 255 letters, digits, dots, dashes, slashes and underscores, a shape up to 8 dimensions.",
        ) from None


class WireBits:
    """Checked tensors as bit patterns."""

    def __init__(self, tensors: Sequence[WireTensor]) -> None:
        self.tensors = tensors

    def bits(self, piece: Piece) -> Bits:
        tensor, start = self.tensors[piece.tensor], piece.start * piece.item_bytes
        window = memoryview(tensor.data)[start : start + piece.size_bytes]
        return np.frombuffer(window, storage_of(tensor.dtype))


@dataclass(frozen=True)
class Leaf:
    """One of a tensor; its digest is computed when it is first asked for."""

    data: memoryview
    known: list[str] = field(default_factory=list)

    def digest(self) -> str:
        if not self.known:
            self.known.append(digest_bytes(self.data))
        return self.known[0]


class TensorDigests:
    """Hashes the leaves of checked tensors, each once: where it is used first, or on a pool."""

    def __init__(self, tensors: Sequence[WireTensor], pool: ThreadPoolExecutor) -> None:
        self._tensors = tensors
        self._pool = pool
        self._leaves = [_leaves(memoryview(tensor.data)) for tensor in tensors]
        self._digests: dict[int, Future[str]] = {}

    def leaves(self, number: int) -> Sequence[Leaf]:
        return self._leaves[number]

    def start(self, number: int) -> None:
        if number not in self._digests:
            leaves = self._leaves[number]
            self._digests[number] = self._pool.submit(lambda: join_leaves([leaf.digest() for leaf in leaves]))

    def entries(self) -> list[TensorEntry]:
        for number in range(len(self._tensors)):
            self.start(number)
        return [_describe(tensor, self._digests[number].result()) for number, tensor in enumerate(self._tensors)]


def _leaves(data: memoryview) -> list[Leaf]:
    return [Leaf(data[start:end]) for start, end in leaf_ranges(len(data))]
