"""How a model is cut into blocks that are encoded, sent and applied one by one, and views of its numbers as bit patterns.

A piece is a run of numbers of one tensor; a block is a list of pieces of bounded size. The cut follows from the list of tensors
and the span alone, so both sides make the same one and nothing about it is sent. Nothing here needs compiled code, so that a
manifest can be checked without it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16] | NDArray[np.uint32]


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

ITEM_BYTES = {dtype: layout.width // 8 for dtype, layout in LAYOUTS.items()}


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
    blocks: list[Block] = []
    free = 0
    for number, tensor in enumerate(tensors):
        item_bytes = ITEM_BYTES[tensor.dtype]
        start, end = 0, math.prod(tensor.shape)
        while start < end:
            if free < item_bytes:
                blocks.append([])
                free = max(span_bytes, item_bytes)
            count = min(end - start, free // item_bytes)
            blocks[-1].append(Piece(number, start, count, item_bytes))
            start += count
            free -= count * item_bytes
    return blocks


def offsets(tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor begins when all lie one after the other."""
    starts, at = [], 0
    for tensor in tensors:
        starts.append(at)
        at += math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
    return starts


class TensorBits:
    """Tensors one after the other in memory (usually a mapped file), as bit patterns."""

    def __init__(self, tensors: Sequence[Tensor], data: memoryview) -> None:
        self.tensors = tensors
        self._data = data
        self._offsets = offsets(tensors)
        self._by_name = {tensor.name: number for number, tensor in enumerate(tensors)}

    def bits(self, piece: Piece) -> Bits:
        tensor = self.tensors[piece.tensor]
        start = self._offsets[piece.tensor] + piece.start * piece.item_bytes
        window = self._data[start : start + piece.size_bytes]
        return np.frombuffer(window, LAYOUTS[tensor.dtype].storage)

    def same_piece(self, tensor: Tensor, piece: Piece) -> Bits | None:
        """The numbers at the same place of the tensor with the same name, if it has the same type and shape."""
        number = self._by_name.get(tensor.name)
        if number is None:
            return None
        mine = self.tensors[number]
        if (mine.dtype, mine.shape) != (tensor.dtype, tensor.shape):
            return None
        return self.bits(Piece(number, piece.start, piece.count, piece.item_bytes))
