import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broadcast.codec.changes import Changes, encode_changes
from shoal.broadcast.codec.entropy import Reader
from shoal.broadcast.codec.pieces import LAYOUTS, Bits, Layout
from shoal.errors import IntegrityError

SPECIAL = {
    16: [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0x7FFF, 0xFFFF, 0x7F81, 0x3F80, 0x7FFE],
    32: [0, 1 << 31, 1, (1 << 31) | 1, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001],
}


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, list[tuple[Bits, Bits]]]:
    """Arrays of any bits, special values often, changed anywhere from nowhere to everywhere and by little or by much."""
    layout = draw(st.sampled_from(list(LAYOUTS.values())))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rate, largest = draw(st.sampled_from([0.0, 0.01, 0.3, 1.0])), draw(st.sampled_from([1, 3, 1000, 2**31]))
    result = []
    for size in draw(st.lists(st.integers(0, 200), min_size=1, max_size=4)):
        base = rng.integers(0, 1 << layout.width, size, dtype=np.uint64)
        special = rng.random(size) < 0.3
        base[special] = rng.choice(SPECIAL[layout.width], special.sum())
        steps = rng.integers(-largest, largest + 1, size) * (rng.random(size) < rate)
        new = (base.astype(np.int64) + steps) & ((1 << layout.width) - 1)
        result.append((base.astype(layout.storage), new.astype(layout.storage)))
    return layout, result


@settings(deadline=None, max_examples=80)
@given(pairs(), st.integers(1, 5))
def test_any_bits_survive_in_parts_of_any_size(case: tuple[Layout, list[tuple[Bits, Bits]]], parts: int) -> None:
    layout, arrays = case
    encoded = encode_changes(arrays, layout)
    results = [base.copy() for base, _ in arrays]
    reader = Reader(encoded)
    changes = Changes(reader, sum(map(len, results)), layout)
    for result in results:
        step = len(result) // parts + 1
        for start in range(0, len(result), step):
            changes.apply(result[start : start + step])
    changes.finish()
    assert reader.left == 0
    for result, (_, new) in zip(results, arrays, strict=True):
        assert result.tobytes() == new.tobytes()


def sparse_pair(size: int = 20_000, rate: float = 0.01) -> tuple[Bits, Bits]:
    rng = np.random.default_rng(1)
    base = (rng.normal(0, 0.05, size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = base.copy()
    new[rng.random(size) < rate] += np.uint16(1)
    return base, new


def test_sparse_change_costs_about_its_entropy() -> None:
    base, new = sparse_pair(size=400_000)
    rate = 0.01
    position_bits = -(rate * np.log2(rate) + (1 - rate) * np.log2(1 - rate))
    sign_bits = rate
    encoded = encode_changes([(base, new)], LAYOUTS["bfloat16"])
    assert 8 * len(encoded) < 1.15 * len(base) * (position_bits + sign_bits)


def test_unchanged_numbers_cost_next_to_nothing() -> None:
    base, _ = sparse_pair()
    assert len(encode_changes([(base, base)], LAYOUTS["bfloat16"])) < 300


def apply_all(reader: Reader, numbers: Bits) -> None:
    changes = Changes(reader, len(numbers), LAYOUTS["bfloat16"])
    changes.apply(numbers)
    changes.finish()


def test_wrong_base_is_noticed_or_gives_other_bits() -> None:
    base, new = sparse_pair()
    encoded = encode_changes([(base, new)], LAYOUTS["bfloat16"])
    other = base[::-1].copy()
    try:
        apply_all(Reader(encoded), other)
    except IntegrityError:
        return
    assert other.tobytes() != new.tobytes()


@pytest.mark.parametrize("seed", range(60))
def test_damaged_delta_never_reads_or_writes_outside(seed: int) -> None:
    base, new = sparse_pair(size=2000, rate=0.1)
    encoded = bytearray(encode_changes([(base, new)], LAYOUTS["bfloat16"]))
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 4)):
        encoded[rng.randrange(len(encoded))] ^= 1 << rng.randrange(8)
    cut = rng.choice([len(encoded), rng.randrange(len(encoded))])
    result = base.copy()
    try:
        apply_all(Reader(bytes(encoded[:cut])), result)
    except IntegrityError:
        return
    assert len(result) == len(base)
