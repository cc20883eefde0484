"""The bytes of a published version, put together block by block from the publisher's own shards: the base of the next delta.

Nothing is kept on disk for this besides what is served anyway: the last version in full and the deltas after it. So publishing a
delta writes the delta and nothing else, and any version that can be served can be a base, also after a restart. That costs one
read of the model and one pass over it per delta of the chain; a small model is remembered in memory instead.
"""

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate

import numpy as np

from shoal.broadcast.codec.pieces import (
    Bits,
    Block,
    Bytes,
    InPlace,
    Piece,
    Tensor,
    block_bytes,
    outline,
    partition,
    read_at,
    storage_of,
)
from shoal.broadcast.manifest import BaseRef, Encoding, Manifest, ShardEntry
from shoal.broadcast.store import ShardCutter, ShardStore, open_to_read
from shoal.broadcast.wire import TensorDigests, WireBits

SPAN_BYTES = 32 << 20
BLOCKS_AHEAD = 4


class ShardReader:
    """The bytes of an encoding at any place, from the files of its shards."""

    def __init__(self, store: ShardStore, shards: Sequence[ShardEntry]) -> None:
        self._store = store
        self._shards = shards
        self._ends = list(accumulate(shard.size_bytes for shard in shards))

    def read_into(self, start: int, view: memoryview) -> None:
        number = bisect_right(self._ends, start)
        while len(view):
            count = min(len(view), self._ends[number] - start)
            with open_to_read(self._store.path("shards", self._shards[number].digest)) as file:
                offset = start - self._ends[number] + self._shards[number].size_bytes
                read_at(file.fileno(), view[:count], offset)
            view, start, number = view[count:], start + count, number + 1


class RememberedVersion:
    """The bytes of the version that was published last, in memory that is overwritten by the next one; nothing of a large one."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._digest = ""
        self._bytes = np.empty(0, np.uint8)

    def of(self, digest: str) -> Bytes | None:
        return self._bytes if digest == self._digest else None

    def begin(self, size_bytes: int) -> None:
        """Another version follows, part by part; until it has a name nothing is remembered."""
        self._digest = ""
        if size_bytes != len(self._bytes):
            self._bytes = np.empty(size_bytes if size_bytes <= self._max_bytes else 0, np.uint8)

    def put(self, start: int, data: Bytes) -> None:
        if len(self._bytes):
            self._bytes[start : start + len(data)] = data

    def end(self, digest: str) -> None:
        self._digest = digest if len(self._bytes) else ""


class PublishedVersion:
    """A version by its manifests: one with a full encoding first, then those of the deltas that lead from it to the version."""

    def __init__(
        self, store: ShardStore, chain: Sequence[tuple[str, Manifest]], span_bytes: int, remembered: RememberedVersion
    ) -> None:
        self.digest, self.manifest = chain[-1]
        self._memory = remembered.of(self.digest)
        full, *deltas = [manifest for _, manifest in chain]
        self._store = store
        self._span_bytes = span_bytes
        self._full = _encoding(full, "full")
        self._deltas = [_encoding(manifest, "delta") for manifest in deltas]
        self._same_tensors = all(outline(manifest.tensors) == outline(full.tensors) for manifest in deltas)
        self._full_reader = ShardReader(store, self._full.shards)
        self._delta_readers = [ShardReader(store, delta.shards) for delta in self._deltas]
        self._block_ends = [list(accumulate(delta.block_bytes)) for delta in self._deltas]
        self._own = (
            threading.local()
        )  # one buffer per thread; new pages for every block would cost more than filling it

    @property
    def reference(self) -> BaseRef:
        manifest = self.manifest
        return BaseRef(version=manifest.version, manifest_digest=self.digest, weights_digest=manifest.weights_digest)

    def usable(self, tensors: Sequence[Tensor], pool: ThreadPoolExecutor) -> bool:
        """Whether every byte is here and these tensors are cut into the same blocks."""
        if not self._same_tensors or outline(tensors) != outline(self.manifest.tensors):
            return False
        if self._memory is not None:
            return True
        if any(delta.span_bytes != self._span_bytes for delta in self._deltas):
            return False
        shards = [shard.digest for encoding in (self._full, *self._deltas) for shard in encoding.shards]
        unknown = [digest for digest in shards if not self._store.has("shards", digest)]
        return all(pool.map(lambda digest: self._store.recover("shards", digest), unknown))

    def block(self, number: int, start: int, block: Block) -> "BlockBits":
        """The numbers of one block, which begins at byte `start` of the model; valid until this thread's next call."""
        from shoal.broadcast.codec.blocks import apply_block  # compiled code, needed for deltas only

        size_bytes = block_bytes(block)
        if self._memory is not None:
            return BlockBits(block, self.manifest.tensors, self._memory[start : start + size_bytes])
        if getattr(self._own, "buffer", None) is None or len(self._own.buffer) < size_bytes:
            self._own.buffer = np.empty(size_bytes, np.uint8)
        buffer = self._own.buffer[:size_bytes]
        self._full_reader.read_into(start, buffer.data)
        for delta, reader, ends in zip(self._deltas, self._delta_readers, self._block_ends, strict=True):
            payload = memoryview(bytearray(delta.block_bytes[number]))
            reader.read_into(ends[number] - len(payload), payload)
            apply_block(payload, block, InPlace(), self.manifest.tensors, buffer)
        return BlockBits(block, self.manifest.tensors, buffer)


class BlockBits:
    """The numbers of one block."""

    def __init__(self, block: Block, tensors: Sequence[Tensor], buffer: Bytes) -> None:
        self._bits: dict[tuple[int, int], Bits] = {}
        at = 0
        for piece in block:
            part = buffer[at : at + piece.size_bytes]
            self._bits[piece.tensor, piece.start] = part.view(storage_of(tensors[piece.tensor].dtype))
            at += piece.size_bytes

    def same_piece(self, tensor: Tensor, piece: Piece) -> Bits | None:
        return self._bits[piece.tensor, piece.start]


def write_delta(
    base: PublishedVersion,
    new: WireBits,
    digests: TensorDigests,
    cutter: ShardCutter,
    pool: ThreadPoolExecutor,
    span_bytes: int,
    remembered: RememberedVersion,
) -> Encoding:
    """Encode block after block on the pool, a few ahead, and cut the results into shards in order.

    Where the base is remembered, each block of it is overwritten by the new one as soon as it was compared.
    """
    from shoal.broadcast.codec.blocks import encode_block  # compiled code, needed for deltas only

    sizes: list[int] = []
    pending: deque[Future[bytes]] = deque()

    def encode(number: int, start: int, block: Block) -> bytes:
        payload = encode_block(block, base.block(number, start, block), new)
        for piece in block:
            remembered.put(start, new.bits(piece).view(np.uint8))
            start += piece.size_bytes
        return payload

    def take_one() -> None:
        payload = pending.popleft().result()
        sizes.append(len(payload))
        cutter.feed(payload)

    start = 0
    for number, block in enumerate(partition(new.tensors, span_bytes)):
        if len(pending) >= BLOCKS_AHEAD:
            take_one()
        for piece in block:
            digests.start(piece.tensor)
        pending.append(pool.submit(encode, number, start, block))
        start += block_bytes(block)
    while pending:
        take_one()
    return Encoding(
        kind="delta", base=base.reference, shards=cutter.finish(), span_bytes=span_bytes, block_bytes=tuple(sizes)
    )


def _encoding(manifest: Manifest, kind: str) -> Encoding:
    return next(encoding for encoding in manifest.encodings if encoding.kind == kind)
