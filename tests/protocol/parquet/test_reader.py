from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.parquet.reader import (
    MAX_PAGE_HEADER_BYTES,
    MAX_PAGES,
    Column,
    Kind,
    Limits,
    ParquetError,
    ParquetFile,
)
from shoal.protocol.rollouts import WRITER_OPTIONS

COLUMNS = (Column("name", Kind.BYTES), Column("size", Kind.INT32), Column("parts", Kind.FLOAT, is_list=True))
SCHEMA = pa.schema(
    [
        pa.field("name", pa.binary(), nullable=False),
        pa.field("size", pa.int32(), nullable=False),
        pa.field("parts", pa.list_(pa.field("element", pa.float32(), nullable=False)), nullable=False),
    ]
)
LIMITS = Limits(rows=10_000, values_per_column=100_000, decompressed_bytes=1 << 20)
Rows = dict[str, list[Any]]
ROWS: Rows = {"name": [b"a", b"", b"ccc"], "size": [1, -2, 3], "parts": [[0.5], [], [1.0, 2.0]]}


def parquet(rows: Rows, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, SCHEMA, **WRITER_OPTIONS | options) as writer:
        writer.write_table(pa.table(rows, schema=SCHEMA))
    data: bytes = sink.getvalue().to_pybytes()
    return data


def read(data: bytes, limits: Limits = LIMITS) -> dict[str, list[Any]]:
    return ParquetFile(data, COLUMNS).read(limits)


row = st.tuples(
    st.binary(max_size=8),
    st.integers(-(2**31), 2**31 - 1),
    st.lists(st.floats(width=32, allow_nan=False), max_size=20),
)


@given(st.lists(row, max_size=30), st.sampled_from([1, 64, 1 << 20]), st.sampled_from(["zstd", "none"]))
def test_whatever_arrow_writes_plainly_is_read_the_same(
    rows: list[tuple[bytes, int, list[float]]], page_bytes: int, compression: str
) -> None:
    columns = {name: [one[index] for one in rows] for index, name in enumerate(("name", "size", "parts"))}
    data = parquet(columns, data_page_size=page_bytes, write_batch_size=4, compression=compression)
    assert read(data) == columns


def test_long_runs_of_levels_are_read_the_same() -> None:
    rows: Rows = {"name": [b"x"] * 400, "size": [0] * 400, "parts": [[1.0] * (index % 97) for index in range(400)]}
    assert read(parquet(rows)) == rows


def header_number(data: bytes, column: int, field: int | str) -> int:
    """Position of the one-byte number of this field in the first page header of a column."""
    start: int = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0).column(column).data_page_offset
    position = start + {1: 1, 2: 3, 3: 5, "values": 8, "encoding": 10}[field]
    assert data[position] < 0x80
    return position


def patched(column: int, field: int | str, value: int) -> bytes:
    data = bytearray(parquet(ROWS))
    data[header_number(bytes(data), column, field)] = value
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (patched(0, 1, 4), "not a data page"),
        (patched(0, 2, 0x7E), "another size"),
        (patched(0, 2, 0x01), "negative"),
        (patched(0, 3, 0x7E), "past the end"),
        (patched(0, 3, 0x01), "past the end"),
        (patched(0, "values", 0x7E), "63 values of name"),
        (patched(1, "encoding", 0x10), "not encoded as plain"),
    ],
)
def test_page_headers_that_lie_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(ParquetError, match=why):
        read(data)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (Limits(2, 100, 1000), "3 rows"),
        (Limits(3, 3, 1000), "4 values of parts"),
        (Limits(3, 100, 40), "More than 40 bytes"),
    ],
)
def test_limits_hold(limits: Limits, why: str) -> None:
    with pytest.raises(ParquetError, match=why):
        read(parquet(ROWS), limits)


def test_too_many_pages_are_refused() -> None:
    count = 2 * MAX_PAGES
    rows: Rows = {"name": [b""] * count, "size": [0] * count, "parts": [[]] * count}
    with pytest.raises(ParquetError, match=f"more than {MAX_PAGES} pages"):
        read(parquet(rows, data_page_size=1, write_batch_size=1))


def test_a_page_header_of_unusual_size_is_not_parsed() -> None:
    rows: Rows = {"name": [b"x" * (2 * MAX_PAGE_HEADER_BYTES)], "size": [0], "parts": [[]]}
    data = parquet(rows, write_statistics=["name"])  # the header holds the least and the greatest value
    with pytest.raises(ParquetError, match="ends too early"):
        read(data)


def test_a_frame_that_asks_for_more_than_its_page_is_not_decompressed() -> None:
    data = parquet({"name": [b"\0" * 40], "size": [0], "parts": [[]]})
    frame = data.index(zstandard.FRAME_HEADER)
    size_byte = frame + 5
    assert data[size_byte] == 44
    with pytest.raises(ParquetError, match="another size"):
        read(data[:size_byte] + bytes([200]) + data[size_byte + 1 :])


def test_a_broken_frame_is_refused_and_the_next_file_is_read() -> None:
    data = parquet({"name": [b"\0" * 40], "size": [0], "parts": [[]]})
    frame = data.index(zstandard.FRAME_HEADER)
    for _ in range(3):
        with pytest.raises(ParquetError, match="decompressed"):
            read(data[: frame + 6] + b"\xff\xff\xff" + data[frame + 9 :])
        assert read(parquet(ROWS)) == ROWS


def test_several_threads_read_at_once() -> None:
    files: list[Rows] = [
        {"name": [bytes([number]) * 5000], "size": [number], "parts": [[float(number)]]} for number in range(40)
    ]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(read, [parquet(rows) for rows in files])) == files
