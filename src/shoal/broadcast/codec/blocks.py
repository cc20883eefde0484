"""One block of a model as bytes, relative to the same block of its base.

Each piece takes its cheapest encoding: nothing (unchanged), changes, compressed, or raw, so a dense update never grows and tensors
that are new or have changed their type need no base. Integers have no changes: they are unchanged, compressed or raw. Applying
needs the base and gives every bit back, or refuses.
"""

from collections.abc import Sequence

import numpy as np
import zstandard

from shoal.broadcast.codec import kernels
from shoal.broadcast.codec.changes import apply_changes, encode_changes
from shoal.broadcast.codec.entropy import Reader, corrupt, decompress, varint
from shoal.broadcast.codec.pieces import (
    LAYOUTS,
    Base,
    Bits,
    Block,
    Bytes,
    Layout,
    NewNumbers,
    OldNumbers,
    Piece,
    Tensor,
    block_bytes,
    storage_of,
)

SAME, CHANGED, COMPRESSED, RAW = range(4)
# Below this rate changes are cheaper than anything else, so the others are not even tried.
SPARSE_RATE = 0.5
LEVEL = 3


def encode_block(block: Block, base: OldNumbers, new: NewNumbers) -> bytes:
    pairs = [(base.same_piece(new.tensors[piece.tensor], piece), new.bits(piece)) for piece in block]
    layouts = [LAYOUTS.get(new.tensors[piece.tensor].dtype) for piece in block]
    modes, bodies = [], []
    for piece, (old, numbers), layout in zip(block, pairs, layouts, strict=True):
        mode, body = _choose_mode(old, numbers, layout, piece.item_bytes)
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
    base: Base,
    tensors: Sequence[Tensor],
    buffer: Bytes | None = None,
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
        part = buffer[at : at + piece.size_bytes]
        at += piece.size_bytes
        _read_piece(reader, mode, tensor, piece, base, part)
        numbers: Bits = part.view(storage_of(tensor.dtype))
        results.append(numbers)
        if mode == CHANGED:
            changed[LAYOUTS[tensor.dtype]].append(numbers)
    for layout, arrays in changed.items():
        if arrays:
            apply_changes(reader, arrays, layout)
    if reader.left:
        raise corrupt("bytes are left over")
    return results


def _choose_mode(old: Bits | None, numbers: Bits, layout: Layout | None, item_bytes: int) -> tuple[int, bytes]:
    if old is not None:
        if not (kernels.differ(old, numbers) if layout else (old != numbers).any()):
            return SAME, b""
        if layout and kernels.sampled_changes(old, numbers) < SPARSE_RATE:
            return CHANGED, b""
    compressed = _compress(numbers, item_bytes)
    body = varint(len(compressed)) + compressed
    if layout and old is not None and len(encode_changes([(old, numbers)], layout)) < min(len(body), numbers.nbytes):
        return CHANGED, b""
    return (COMPRESSED, body) if len(body) < numbers.nbytes else (RAW, numbers.tobytes())


def _read_piece(reader: Reader, mode: int, tensor: Tensor, piece: Piece, base: Base, out: Bytes) -> None:
    if mode == SAME or (mode == CHANGED and tensor.dtype in LAYOUTS):
        if not base.copy_piece(tensor, piece, out):
            raise corrupt("it changes a tensor that its base does not have")
    elif mode == RAW:
        out[:] = reader.array(piece.size_bytes)
    elif mode == COMPRESSED:
        planes = np.frombuffer(decompress(reader.take(reader.varint(piece.size_bytes)), piece.size_bytes), np.uint8)
        out.reshape(-1, piece.item_bytes)[:] = planes.reshape(piece.item_bytes, -1).T
    else:
        raise corrupt(f"a piece of type {tensor.dtype} has no mode {mode}")


def _compress(numbers: Bits, item_bytes: int) -> bytes:
    """Byte planes apart: exponents repeat, mantissas do not."""
    planes = numbers.view(np.uint8).reshape(-1, item_bytes).T
    return zstandard.ZstdCompressor(level=LEVEL).compress(planes.tobytes())
