"""One block of a model as bytes, relative to the same block of its base.

Each piece takes its cheapest encoding: nothing (unchanged), changes, compressed, or raw, so a dense update never grows and tensors
that are new or have changed their type need no base. Integers have no changes: they are unchanged, compressed or raw. Applying
needs the base and gives every bit back, or refuses.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import zstandard

from shoal.broadcast.codec import kernels
from shoal.broadcast.codec.changes import Changes, encode_changes
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
Source = Bytes | Layout | None
"""Where the numbers of a piece come from: bytes of the delta, one row per number; changes to the base; or the base alone."""
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
    buffer = np.empty(block_bytes(block), np.uint8) if buffer is None else buffer
    delta = BlockDelta(payload, block, tensors)
    results = delta.apply(block, base, buffer)
    delta.finish()
    return results


class BlockDelta:
    """One block of a delta, decoded. It is applied window by window, so that each stays in the processor's cache."""

    def __init__(self, payload: memoryview, block: Block, tensors: Sequence[Tensor]) -> None:
        reader = Reader(payload)
        self._tensors = tensors
        modes = bytes(reader.take(len(block)))
        sources = (
            _read_source(reader, mode, tensors[piece.tensor], piece) for piece, mode in zip(block, modes, strict=True)
        )
        self._left = deque(zip(block, list(sources), strict=True))
        self._changes: dict[Layout, Changes] = {}
        for layout in LAYOUTS.values():
            sizes = [piece.count for piece, source in self._left if source is layout]
            if sizes:
                self._changes[layout] = Changes(reader, sum(sizes), layout)
        if reader.left:
            raise corrupt("bytes are left over")

    def apply(self, window: Block, base: Base, buffer: Bytes) -> list[Bits]:
        """The numbers of the next pieces or parts of them, one after the other in `buffer`; the base is only read."""
        at = 0
        results = []
        for part in window:
            piece, source = self._left[0]
            tensor = self._tensors[part.tensor]
            out = buffer[at : at + part.size_bytes]
            at += part.size_bytes
            numbers: Bits = out.view(storage_of(tensor.dtype))
            if isinstance(source, np.ndarray):
                first = part.start - piece.start
                out.reshape(-1, part.item_bytes)[:] = source[first : first + part.count]
            elif not base.copy_piece(tensor, part, out):
                raise corrupt("it changes a tensor that its base does not have")
            elif source is not None:
                self._changes[source].apply(numbers)
            results.append(numbers)
            if part.start + part.count == piece.start + piece.count:
                self._left.popleft()
        return results

    def finish(self) -> None:
        """Raise if there are changes that belong to no number."""
        for changes in self._changes.values():
            changes.finish()


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


def _read_source(reader: Reader, mode: int, tensor: Tensor, piece: Piece) -> Source:
    if mode == SAME:
        return None
    if mode == CHANGED and tensor.dtype in LAYOUTS:
        return LAYOUTS[tensor.dtype]
    if mode == RAW:
        return reader.array(piece.size_bytes).reshape(-1, piece.item_bytes)
    if mode == COMPRESSED:
        planes = np.frombuffer(decompress(reader.take(reader.varint(piece.size_bytes)), piece.size_bytes), np.uint8)
        return planes.reshape(piece.item_bytes, -1).T
    raise corrupt(f"a piece of type {tensor.dtype} has no mode {mode}")


def _compress(numbers: Bits, item_bytes: int) -> bytes:
    """Byte planes apart: exponents repeat, mantissas do not."""
    planes = numbers.view(np.uint8).reshape(-1, item_bytes).T
    return zstandard.ZstdCompressor(level=LEVEL).compress(planes.tobytes())
