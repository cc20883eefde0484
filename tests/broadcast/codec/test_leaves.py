import bisect
import itertools
import random

import pytest

from shoal.broadcast.codec.leaves import LEAF_BYTES, LeafChain, RunHasher, digest_tensor, join_leaves, leaf_ranges
from shoal.files import digest_bytes

SIZES = (0, 1, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, 2 * LEAF_BYTES, 2 * LEAF_BYTES + 77)


@pytest.mark.parametrize("size_bytes", SIZES)
def test_leaves_cover_a_tensor_once(size_bytes: int) -> None:
    ranges = leaf_ranges(size_bytes)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size_bytes
    assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))
    assert all(end - start == LEAF_BYTES for start, end in ranges[:-1])


@pytest.mark.parametrize("seed", range(8))
def test_tensors_have_their_digests_however_their_bytes_are_cut_into_runs_and_parts(seed: int) -> None:
    draw = random.Random(seed)
    tensors = [memoryview(draw.randbytes(size_bytes)) for size_bytes in draw.sample(SIZES[1:], 4)]
    ends = list(itertools.accumulate(map(len, tensors)))
    cuts = {0, ends[-1], *(draw.randrange(ends[-1]) for _ in range(draw.choice((0, 3, 40))))}
    chain, digests = LeafChain(), []
    for begin, end in itertools.pairwise(sorted(cuts)):
        run, at = RunHasher(), begin
        while at < end:
            number = bisect.bisect_right(ends, at)
            start = at - (ends[number] - len(tensors[number]))
            count = min(draw.choice((1, 4096, 300_000, LEAF_BYTES, 3 * LEAF_BYTES)), end - at, ends[number] - at)
            run.update(tensors[number][start : start + count], start, len(tensors[number]))
            at += count
        digests += chain.take(run)
    left = iter(digests)
    for tensor in tensors:
        own = list(itertools.islice(left, len(leaf_ranges(len(tensor)))))
        assert join_leaves(own) == digest_tensor(tensor)
    assert not list(left)


def test_every_byte_and_the_order_of_leaves_count() -> None:
    data = bytearray(random.Random(0).randbytes(2 * LEAF_BYTES + 5))
    before = digest_tensor(memoryview(data))
    for place in (0, LEAF_BYTES - 1, LEAF_BYTES, len(data) - 1):
        data[place] ^= 1
        assert digest_tensor(memoryview(data)) != before
        data[place] ^= 1
    swapped = data[LEAF_BYTES : 2 * LEAF_BYTES] + data[:LEAF_BYTES] + data[2 * LEAF_BYTES :]
    assert digest_tensor(memoryview(swapped)) != before


def test_a_tensor_of_one_leaf_has_its_digest() -> None:
    assert digest_tensor(memoryview(b"abc")) == join_leaves([digest_bytes(b"abc")]) == digest_bytes(b"abc")
