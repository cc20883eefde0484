import math

import pytest

from shoal.broadcast.codec.pieces import offsets, partition
from shoal.broadcast.manifest import TensorEntry

TENSORS = [
    TensorEntry.model_validate({"name": name, "dtype": dtype, "shape": shape, "digest": "a" * 64})
    for name, dtype, shape in [
        ("a", "bfloat16", (7, 3)),
        ("b", "float32", ()),
        ("c", "float16", (0, 9)),
        ("d", "float32", (50,)),
        ("e", "bfloat16", (1,)),
    ]
]


@pytest.mark.parametrize("span_bytes", [1, 2, 3, 4, 7, 16, 100, 1000])
def test_blocks_cover_every_number_once_and_in_order(span_bytes: int) -> None:
    blocks = partition(TENSORS, span_bytes)
    covered = [(piece.tensor, piece.start + at) for block in blocks for piece in block for at in range(piece.count)]
    assert covered == [(number, at) for number, tensor in enumerate(TENSORS) for at in range(math.prod(tensor.shape))]
    assert all(sum(piece.size_bytes for piece in block) <= max(span_bytes, 4) for block in blocks)


def test_no_tensors_make_no_blocks() -> None:
    assert partition([], 100) == []


def test_offsets_follow_the_sizes() -> None:
    assert offsets(TENSORS) == [0, 42, 46, 46, 246]
