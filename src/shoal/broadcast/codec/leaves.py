"""The digest of a tensor, made from those of its leaves, so that nobody hashes a byte twice.

A leaf is a run of 2 MiB, counted from the tensor's first byte; the last one may be shorter. The digest of a tensor is that of the
digests of its leaves, or that of its only leaf. A full encoding is cut into shards at the same places, as far as the size of a
shard allows it, and a shard that is one leaf has the leaf's digest.
"""

from collections.abc import Sequence

from blake3 import blake3

from shoal.files import digest_bytes

LEAF_BYTES = 2 << 20


def leaf_ranges(size_bytes: int) -> list[tuple[int, int]]:
    """Where the leaves of a tensor begin and end; one that is empty has one empty leaf."""
    return [(start, min(start + LEAF_BYTES, size_bytes)) for start in range(0, max(size_bytes, 1), LEAF_BYTES)]


def join_leaves(digests: Sequence[str]) -> str:
    return digests[0] if len(digests) == 1 else digest_bytes(bytes.fromhex("".join(digests)))


def digest_tensor(data: memoryview) -> str:
    return join_leaves([digest_bytes(data[start:end]) for start, end in leaf_ranges(len(data))])


class TensorHasher:
    """The digest of a tensor whose bytes come in parts of any size."""

    def __init__(self) -> None:
        self._digests: list[str] = []
        self._leaf = blake3()
        self._filled = 0

    def update(self, data: memoryview) -> None:
        while len(data):
            part = data[: LEAF_BYTES - self._filled]
            self._leaf.update(part)
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == LEAF_BYTES:
                self._end_leaf()

    def hexdigest(self) -> str:
        """Of everything so far; ends the tensor."""
        if self._filled or not self._digests:
            self._end_leaf()
        return join_leaves(self._digests)

    def _end_leaf(self) -> None:
        self._digests.append(self._leaf.hexdigest())
        self._leaf, self._filled = blake3(), 0
