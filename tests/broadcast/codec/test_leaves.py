import itertools
import random

import pytest

from shoal.broadcast.codec.leaves import LEAF_BYTES, TensorHasher, digest_tensor, join_leaves, leaf_ranges
from shoal.files import digest_bytes

SIZES = (0, 1, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, 2 * LEAF_BYTES, 2 * LEAF_BYTES + 77)


@pytest.mark.parametrize("size_bytes", SIZES)
def test_leaves_cover_a_tensor_once(size_bytes: int) -> None:
    ranges = leaf_ranges(size_bytes)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size_bytes
    assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))
    assert all(end - start == LEAF_BYTES for start, end in ranges[:-1])


@pytest.mark.parametrize("size_bytes", SIZES)
def test_a_tensor_has_one_digest_however_its_bytes_come(size_bytes: int) -> None:
    draw = random.Random(size_bytes)
    data = memoryview(draw.randbytes(size_bytes))
    hasher, at = TensorHasher(), 0
    while at < size_bytes:
        count = draw.choice((1, 4096, 300_000, LEAF_BYTES, 3 * LEAF_BYTES))
        hasher.update(data[at : at + count])
        at += count
    assert hasher.hexdigest() == digest_tensor(data)


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
