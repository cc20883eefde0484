import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broadcast.codec.blocks import RAW, apply_block, encode_block
from shoal.broadcast.codec.pieces import ITEM_BYTES, TensorBits, partition
from shoal.broadcast.manifest import TensorEntry
from shoal.errors import IntegrityError

Model = dict[str, tuple[str, tuple[int, ...], bytes]]


def weights_of(model: Model) -> TensorBits:
    entries = [
        TensorEntry.model_validate({"name": name, "dtype": dtype, "shape": shape, "digest": "a" * 64})
        for name, (dtype, shape, _) in model.items()
    ]
    return TensorBits(entries, memoryview(b"".join(data for _, _, data in model.values())))


def rebuild(base: Model, new: Model, span_bytes: int) -> bytes:
    old, wanted = weights_of(base), weights_of(new)
    result = bytearray()
    for block in partition(wanted.tensors, span_bytes):
        payload = encode_block(block, old, wanted)
        assert len(payload) <= len(block) + sum(piece.size_bytes for piece in block)
        for numbers in apply_block(memoryview(payload), block, old, wanted.tensors):
            result += numbers.tobytes()
    return bytes(result)


@st.composite
def models(draw: st.DrawFn) -> tuple[Model, Model]:
    """A model and its successor: tensors stay, change a little or wholly, appear, vanish, change shape or type."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base: Model = {}
    new: Model = {}
    for number in range(draw(st.integers(0, 5))):
        dtype = draw(st.sampled_from(list(ITEM_BYTES)))
        shape = draw(st.sampled_from([(), (0,), (1,), (3, 5), (40,), (2, 0, 3), (7, 30)]))
        size = int(np.prod(shape)) * ITEM_BYTES[dtype]
        data = rng.bytes(size) if draw(st.booleans()) else bytes(size)
        fate = draw(st.sampled_from(["same", "sparse", "dense", "vanish", "appear", "dtype", "shape"]))
        if fate != "appear":
            base[f"t{number}"] = (dtype, shape, data)
        changed = bytearray(data)
        for _ in range(0 if fate == "same" or not size else size if fate == "dense" else 2):
            changed[int(rng.integers(size))] ^= int(rng.integers(256))
        if fate == "dtype":
            other = {"bfloat16": "float16", "float16": "bfloat16", "float32": "int32", "int64": "uint64"}.get(
                dtype, dtype
            )
            new[f"t{number}"] = (other, shape, bytes(changed))
        elif fate == "shape":
            new[f"t{number}"] = (dtype, (1, *shape), bytes(changed))
        elif fate != "vanish":
            new[f"t{number}"] = (dtype, shape, bytes(changed))
    return base, new


@settings(deadline=None, max_examples=100)
@given(models(), st.sampled_from([5, 64, 10_000]))
def test_any_successor_is_rebuilt_bit_by_bit(case: tuple[Model, Model], span_bytes: int) -> None:
    base, new = case
    assert rebuild(base, new, span_bytes) == b"".join(data for _, _, data in new.values())


def noise(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def test_dense_update_never_grows() -> None:
    base: Model = {"w": ("bfloat16", (5000,), noise(10_000, 1))}
    new: Model = {"w": ("bfloat16", (5000,), noise(10_000, 2))}
    assert rebuild(base, new, 4000) == new["w"][2]


def test_new_tensor_is_packed_when_that_helps() -> None:
    values = np.random.default_rng(0).normal(0, 0.02, 5000).astype(np.float32)
    data = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    new = weights_of({"w": ("bfloat16", (5000,), data)})
    (block,) = partition(new.tensors, 1 << 20)
    payload = encode_block(block, weights_of({}), new)
    assert len(payload) < 0.85 * len(data)


def sparse_case() -> tuple[TensorBits, TensorBits]:
    data = noise(4000)
    changed = bytearray(data)
    changed[100] ^= 1
    return weights_of({"w": ("bfloat16", (2000,), data)}), weights_of({"w": ("bfloat16", (2000,), bytes(changed))})


def test_base_without_the_tensor_is_refused() -> None:
    base, new = sparse_case()
    (block,) = partition(new.tensors, 1 << 20)
    payload = encode_block(block, base, new)
    with pytest.raises(IntegrityError, match="does not have"):
        apply_block(memoryview(payload), block, weights_of({}), new.tensors)


def test_leftover_bytes_and_unknown_modes_are_refused() -> None:
    base, new = sparse_case()
    (block,) = partition(new.tensors, 1 << 20)
    payload = encode_block(block, base, new)
    with pytest.raises(IntegrityError, match="left over"):
        apply_block(memoryview(payload + b"x"), block, base, new.tensors)
    with pytest.raises(IntegrityError, match="mode"):
        apply_block(memoryview(b"\x09" + payload[1:]), block, base, new.tensors)
    with pytest.raises(IntegrityError, match="too early"):
        apply_block(memoryview(bytes([RAW]) + b"short"), block, base, new.tensors)


def test_packed_piece_that_claims_another_size_is_refused() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(10_000_000))
    base, new = sparse_case()
    (block,) = partition(new.tensors, 1 << 20)
    from shoal.broadcast.codec.entropy import varint

    with pytest.raises(IntegrityError, match="another size"):
        apply_block(memoryview(b"\x02" + varint(len(bomb)) + bomb), block, base, new.tensors)
