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


class RunHasher:
    """Hashes a run of a model's bytes by itself, which may begin and end within a leaf; `LeafChain` joins runs."""

    def __init__(self) -> None:
        self.head = bytearray()
        """What belongs to the leaf that began before the run: nobody can hash it without what comes before."""
        self.head_ends = False
        self.digests: list[str] = []
        """Of the leaves that lie within the run."""
        self.unfinished: blake3 | None = None
        """The leaf that goes on after the run."""

    def update(self, data: memoryview, start: int, size_bytes: int) -> None:
        """Take the next bytes; they are those from `start` on of a tensor of `size_bytes`."""
        while len(data):
            if start % LEAF_BYTES == 0:
                self.unfinished = blake3()
            end = min(start - start % LEAF_BYTES + LEAF_BYTES, size_bytes)
            part = data[: end - start]
            if self.unfinished is None:
                self.head += part
            else:
                self.unfinished.update(part)
            data, start = data[len(part) :], start + len(part)
            if start == end:
                self._end_leaf()

    def _end_leaf(self) -> None:
        if self.unfinished is None:
            self.head_ends = True
        else:
            self.digests.append(self.unfinished.hexdigest())
            self.unfinished = None


class LeafChain:
    """The digests of the leaves of runs that follow each other."""

    def __init__(self) -> None:
        self._unfinished = blake3()

    def take(self, run: RunHasher) -> list[str]:
        """Those of the leaves that end in the run."""
        ended = []
        self._unfinished.update(run.head)
        if run.head_ends:
            ended.append(self._unfinished.hexdigest())
        if run.unfinished is not None:
            self._unfinished = run.unfinished
        return ended + run.digests
