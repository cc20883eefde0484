import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.parquet.thrift import MAX_DEPTH, Struct, ThriftError, ThriftReader


def read(text: str) -> Struct:
    return ThriftReader(memoryview(bytes.fromhex(text))).struct()


def test_fields_are_read_by_number_and_type() -> None:
    assert read("15 06 18 02 61 62 00") == {1: 3, 2: b"ab"}
    assert read("35 05 11 12 00") == {3: -3, 4: True, 5: False}
    assert read("05 28 02 00") == {20: 1}
    assert read("19 25 02 04 00") == {1: [1, 2]}
    assert read("1c 15 02 00 00") == {1: {1: 1}}
    assert read("17 00 00 00 00 00 00 f0 3f 00") == {1: 1.0}
    assert read("00") == {}


def test_the_reader_stops_behind_the_struct() -> None:
    reader = ThriftReader(memoryview(b"\x15\x06\x00tail"))
    reader.struct()
    assert reader.position == 3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "ends too early"),
        ("15", "ends too early"),
        ("18 7f 61", "ends too early"),
        ("15 02 05 02 04 00", "twice"),
        ("15 ff ff ff ff 7f 00", "more than 32 bits"),
        ("16 ff ff ff ff ff ff ff ff ff ff 01 00", "more than 64 bits"),
        ("15 80 80 80 80 80 80 80 80 80 80 80 80 00", "more than 32 bits"),
        ("19 f5 ff ff ff ff 0f 00", "longer than the bytes"),
        ("1b 00 00", "unknown type"),
        ("1f 00", "unknown type"),
    ],
)
def test_lengths_types_and_repeats_that_lie_are_refused(text: str, why: str) -> None:
    with pytest.raises(ThriftError, match=why):
        read(text)


def test_nesting_is_bounded() -> None:
    with pytest.raises(ThriftError, match="nested deeper"):
        read("1c" * (MAX_DEPTH + 1) + "00" * (MAX_DEPTH + 2))
    with pytest.raises(ThriftError, match="nested deeper"):
        read("19" * 50 + "00" * 50)


@given(st.binary(max_size=300))
def test_noise_is_a_struct_or_refused(data: bytes) -> None:
    try:
        ThriftReader(memoryview(data)).struct()
    except ThriftError:
        return
