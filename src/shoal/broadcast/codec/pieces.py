"""How a model is cut into blocks that are encoded, sent and applied one by one, and views of its numbers as bit patterns.

A piece is a run of numbers of one tensor; a block is a list of pieces of bounded size. The cut follows from the list of tensors
and the span alone, so both sides make the same one and nothing about it is sent. Nothing here needs compiled code, so that a
manifest can be checked without it.
"""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.errors import IntegrityError

Bytes = NDArray[np.uint8]
Bits = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True)
class Layout:
    """How a number type lies in its bits."""

    width: int
    exponent_shift: int

    @property
    def magnitude(self) -> int:
        return (1 << (self.width - 1)) - 1

    @property
    def exponents(self) -> int:
        return (self.magnitude >> self.exponent_shift) + 1

    @property
    def storage(self) -> str:
        return f"<u{self.width // 8}"


LAYOUTS = {"bfloat16": Layout(16, 7), "float16": Layout(16, 10), "float32": Layout(32, 23)}
"""Types whose changes are coded as steps; all others travel as bytes."""

ITEM_BYTES = {dtype: layout.width // 8 for dtype, layout in LAYOUTS.items()} | {
    "float64": 8,
    "int64": 8,
    "uint64": 8,
    "int32": 4,
    "uint32": 4,
    "int16": 2,
    "uint16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


def storage_of(dtype: str) -> str:
    """The numpy type of a tensor's bit patterns."""
    return LAYOUTS[dtype].storage if dtype in LAYOUTS else "<u1"


class Tensor(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Piece:
    tensor: int
    start: int
    count: int
    item_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.count * self.item_bytes


Block = list[Piece]


def block_bytes(block: Block) -> int:
    return sum(piece.size_bytes for piece in block)


def partition(tensors: Sequence[Tensor], span_bytes: int) -> list[Block]:
    """Blocks of at most `span_bytes` (more only if a single number is larger), in the order of the tensors."""
    whole = (
        Piece(number, 0, math.prod(tensor.shape), ITEM_BYTES[tensor.dtype]) for number, tensor in enumerate(tensors)
    )
    return cut(whole, span_bytes)


def cut(pieces: Iterable[Piece], span_bytes: int) -> list[Block]:
    """The same numbers in the same order, in blocks of at most `span_bytes`."""
    blocks: list[Block] = []
    free = 0
    for piece in pieces:
        item_bytes = piece.item_bytes
        start, end = piece.start, piece.start + piece.count
        while start < end:
            if free < item_bytes:
                blocks.append([])
                free = max(span_bytes, item_bytes)
            count = min(end - start, free // item_bytes)
            blocks[-1].append(Piece(piece.tensor, start, count, item_bytes))
            start += count
            free -= count * item_bytes
    return blocks


def outline(tensors: Sequence[Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Everything about tensors but their numbers."""
    return [(tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in tensors]


def offsets(tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor begins when all lie one after the other."""
    starts, at = [], 0
    for tensor in tensors:
        starts.append(at)
        at += math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
    return starts


class NewNumbers(Protocol):
    """What a delta leads to."""

    @property
    def tensors(self) -> Sequence[Tensor]: ...
    def bits(self, piece: Piece) -> Bits: ...


class OldNumbers(Protocol):
    """What a delta is made against."""

    def same_piece(self, tensor: Tensor, piece: Piece) -> Bits | None:
        """The numbers at the same place of the tensor with the same name, if it has the same type and shape."""


class Base(Protocol):
    """What a delta is applied to."""

    def copy_piece(self, tensor: Tensor, piece: Piece, out: Bytes) -> bool:
        """Copy the bytes of `same_piece` to `out`; whether there are any."""


class Places:
    """Where the tensors of a model lie when all are one after the other."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._offsets = offsets(tensors)
        self._by_name = {tensor.name: number for number, tensor in enumerate(tensors)}

    def start(self, piece: Piece) -> int:
        return self._offsets[piece.tensor] + piece.start * piece.item_bytes

    def same(self, tensor: Tensor, piece: Piece) -> Piece | None:
        """The piece at the same place of the tensor with the same name, if it has the same type and shape."""
        number = self._by_name.get(tensor.name)
        if number is None:
            return None
        mine = self._tensors[number]
        if (mine.dtype, mine.shape) != (tensor.dtype, tensor.shape):
            return None
        return Piece(number, piece.start, piece.count, piece.item_bytes)


class TensorBits:
    """Tensors one after the other in memory, as bit patterns."""

    def __init__(self, tensors: Sequence[Tensor], data: memoryview) -> None:
        self.tensors = tensors
        self._data = data
        self._places = Places(tensors)

    def bits(self, piece: Piece) -> Bits:
        start = self._places.start(piece)
        window = self._data[start : start + piece.size_bytes]
        return np.frombuffer(window, storage_of(self.tensors[piece.tensor].dtype))

    def same_piece(self, tensor: Tensor, piece: Piece) -> Bits | None:
        mine = self._places.same(tensor, piece)
        return None if mine is None else self.bits(mine)

    def copy_piece(self, tensor: Tensor, piece: Piece, out: Bytes) -> bool:
        old = self.same_piece(tensor, piece)
        if old is not None:
            out[:] = old.view(np.uint8)
        return old is not None


class InPlace:
    """A base whose bytes are in the buffer that a delta is applied in."""

    def copy_piece(self, tensor: Tensor, piece: Piece, out: Bytes) -> bool:
        return True


class TensorFile:
    """Tensors one after the other in an open file, from `start` on; read as they are used, so nothing stays in memory."""

    def __init__(self, tensors: Sequence[Tensor], file: int, start: int) -> None:
        self._file = file
        self._start = start
        self._places = Places(tensors)

    def copy_piece(self, tensor: Tensor, piece: Piece, out: Bytes) -> bool:
        mine = self._places.same(tensor, piece)
        if mine is not None:
            read_at(self._file, out.data, self._start + self._places.start(mine))
        return mine is not None


def read_at(file: int, view: memoryview, offset: int) -> None:
    """Fill the view from this place of an open file."""
    while len(view):
        count = os.preadv(file, [view], offset)
        if count <= 0:
            raise IntegrityError("A file ends before its tensors do.")
        view, offset = view[count:], offset + count
