import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broadcast.codec.entropy import Reader, read_stream, varint, write_stream
from shoal.errors import IntegrityError


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1)), max_size=300))
def test_numbers_come_back(values: list[int]) -> None:
    reader = Reader(write_stream(np.array(values, np.uint32)))
    assert read_stream(reader, len(values)).tolist() == values
    assert reader.left == 0


def test_skewed_numbers_take_less_than_a_bit_each() -> None:
    values = np.zeros(80_000, np.uint32)
    values[::100] = 1
    assert len(write_stream(values)) < 80_000 / 8 / 8


def test_longer_stream_than_allowed_is_refused_before_it_is_read() -> None:
    with pytest.raises(IntegrityError, match="limit"):
        read_stream(Reader(write_stream(np.zeros(100, np.uint32))), 99)


@given(st.integers(0, 2**62))
def test_varints_come_back(value: int) -> None:
    assert Reader(varint(value)).varint(2**62) == value


def test_endless_varint_is_refused() -> None:
    with pytest.raises(IntegrityError, match="no end"):
        Reader(b"\xff" * 20).varint(2**62)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        read_stream(Reader(data), 1000)
    except IntegrityError:
        return


def test_compressed_tokens_of_another_size_are_refused() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    with pytest.raises(IntegrityError, match="another size"):
        read_stream(Reader(varint(10) + varint(len(bomb)) + bomb + varint(0)), 1000)
