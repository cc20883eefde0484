"""One block of a model as bytes, relative to the same block of its base.

Each piece takes its cheapest encoding: nothing (unchanged), changes, compressed, or raw, so a dense update never grows and tensors
that are new or have changed their type need no base. Applying needs the base and gives every bit back, or refuses.
"""

from collections.abc import Sequence

import numpy as np
import zstandard
from numpy.typing import NDArray

from shoal.broadcast.codec import kernels
from shoal.broadcast.codec.changes import apply_changes, encode_changes
from shoal.broadcast.codec.entropy import Reader, corrupt, decompress, varint
from shoal.broadcast.codec.pieces import LAYOUTS, Bits, Block, Layout, Piece, Tensor, TensorBits, block_bytes

SAME, CHANGED, COMPRESSED, RAW = range(4)
# Below this rate changes are cheaper than anything else, so the others are not even tried.
SPARSE_RATE = 0.5
LEVEL = 3


def encode_block(block: Block, base: TensorBits, new: TensorBits) -> bytes:
    pairs = [(base.same_piece(new.tensors[piece.tensor], piece), new.bits(piece)) for piece in block]
    layouts = [LAYOUTS[new.tensors[piece.tensor].dtype] for piece in block]
    modes, bodies = [], []
    for (old, numbers), layout in zip(pairs, layouts, strict=True):
        mode, body = _choose_mode(old, numbers, layout)
        modes.append(mode)
        bodies.append(body)
    for layout in LAYOUTS.values():
        chosen = [
            (old, numbers)
            for (old, numbers), mode, own in zip(pairs, modes, layouts, strict=True)
            if mode == CHANGED and own == layout and old is not None
        ]
        bodies.append(encode_changes(chosen, layout) if chosen else b"")
    encoded = bytes(modes) + b"".join(bodies)
    if len(encoded) <= len(block) + block_bytes(block):
        return encoded
    return bytes([RAW]) * len(block) + b"".join(numbers.tobytes() for _, numbers in pairs)


def apply_block(
    payload: memoryview,
    block: Block,
    base: TensorBits,
    tensors: Sequence[Tensor],
    buffer: NDArray[np.uint8] | None = None,
) -> list[Bits]:
    """The numbers of every piece of the block, one after the other in `buffer`, if given; the base is only read."""
    reader = Reader(payload)
    buffer = np.empty(block_bytes(block), np.uint8) if buffer is None else buffer
    at = 0
    modes = bytes(reader.take(len(block)))
    results: list[Bits] = []
    changed: dict[Layout, list[Bits]] = {layout: [] for layout in LAYOUTS.values()}
    for piece, mode in zip(block, modes, strict=True):
        tensor = tensors[piece.tensor]
        layout = LAYOUTS[tensor.dtype]
        numbers: Bits = buffer[at : at + piece.size_bytes].view(layout.storage)
        at += piece.size_bytes
        np.copyto(numbers, _read_piece(reader, mode, piece, layout, base.same_piece(tensor, piece)))
        results.append(numbers)
        if mode == CHANGED:
            changed[layout].append(numbers)
    for layout, arrays in changed.items():
        if arrays:
            apply_changes(reader, arrays, layout)
    if reader.left:
        raise corrupt("bytes are left over")
    return results


def _choose_mode(old: Bits | None, numbers: Bits, layout: Layout) -> tuple[int, bytes]:
    if old is not None:
        if not kernels.differ(old, numbers):
            return SAME, b""
        if kernels.sampled_changes(old, numbers) < SPARSE_RATE:
            return CHANGED, b""
    compressed = _compress(numbers)
    body = varint(len(compressed)) + compressed
    if old is not None and len(encode_changes([(old, numbers)], layout)) < min(len(body), numbers.nbytes):
        return CHANGED, b""
    return (COMPRESSED, body) if len(body) < numbers.nbytes else (RAW, numbers.tobytes())


def _read_piece(reader: Reader, mode: int, piece: Piece, layout: Layout, old: Bits | None) -> Bits:
    if mode in (SAME, CHANGED):
        if old is None:
            raise corrupt("it changes a tensor that its base does not have")
        return old
    if mode == RAW:
        return _as_bits(reader.take(piece.size_bytes), layout)
    if mode == COMPRESSED:
        return _decompress(reader.take(reader.varint(piece.size_bytes)), piece, layout)
    raise corrupt(f"there is no piece mode {mode}")


def _compress(numbers: Bits) -> bytes:
    """Byte planes apart: exponents repeat, mantissas do not."""
    planes = numbers.view(np.uint8).reshape(-1, numbers.itemsize).T
    return zstandard.ZstdCompressor(level=LEVEL).compress(planes.tobytes())


def _decompress(data: memoryview, piece: Piece, layout: Layout) -> Bits:
    planes = np.frombuffer(decompress(data, piece.size_bytes), np.uint8)
    return _as_bits(planes.reshape(piece.item_bytes, -1).T.tobytes(), layout)


def _as_bits(data: bytes | memoryview, layout: Layout) -> Bits:
    numbers: NDArray[np.uint16] | NDArray[np.uint32] = np.frombuffer(data, layout.storage)
    return numbers
