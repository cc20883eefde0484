"""A strict reader for the small part of parquet that rollout files use, built for hostile input.

One row group, required columns, lists of required values, plain encoding, data pages of version 1, zstd or nothing. Footer and
page headers are parsed here and every size is checked before bytes are decompressed or values made: a general reader trusts
them, so that 4 kB can ask for gigabytes and one flipped byte can abort the process. Any parquet tool can read these files.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from shoal.errors import IntegrityError
from shoal.protocol.parquet.thrift import Struct, ThriftError, ThriftReader, Value

MAGIC = b"PAR1"
TAIL_BYTES = 8
MAX_FOOTER_BYTES = 64 << 10
MAX_PAGES = 4096
MAX_PAGE_HEADER_BYTES = 1 << 10
"""Thirty are usual. Metadata is read slowly, and all pages of a file together must not take long."""
MAX_WINDOW_BYTES = 8 << 20

DATA_PAGE = 0
PLAIN, RLE = 0, 3
UNCOMPRESSED, ZSTD = 0, 6
REQUIRED, REPEATED = 0, 2

Bits = npt.NDArray[np.uint8]
_UNPACKED = [bytes(byte >> bit & 1 for bit in range(8)) for byte in range(256)]
_RUNS = b"\0" * 0x40, b"\1" * 0x40
_EIGHT_PACKED = 3
"""The head of a run of one byte with eight levels."""


class Kind(IntEnum):
    """Physical types, by their numbers in the format."""

    INT32 = 1
    FLOAT = 4
    DOUBLE = 5
    BYTES = 6


NUMBERS: dict[Kind, np.dtype[Any]] = {
    Kind.INT32: np.dtype("<i4"),
    Kind.FLOAT: np.dtype("<f4"),
    Kind.DOUBLE: np.dtype("<f8"),
}


class ParquetError(IntegrityError):
    """Bytes that are no Parquet file of the agreed kind."""

    code = "parquet"


@dataclass(frozen=True)
class Column:
    name: str
    kind: Kind
    is_list: bool = False


@dataclass(frozen=True)
class Limits:
    rows: int
    values_per_column: int
    decompressed_bytes: int


@dataclass(frozen=True)
class _Chunk:
    """Where the footer says that a column lies, and in what encoding."""

    codec: int
    values: int
    start: int
    size_bytes: int


class ParquetFile:
    """Footer parsed and compared with the expected columns; nothing else has been read."""

    def __init__(self, data: bytes, columns: Sequence[Column]) -> None:
        self._data, self._columns = memoryview(data), columns
        footer = _read_footer(self._data, tuple(columns))
        self.metadata = {_bytes(pair, 1): _bytes(pair, 2) for pair in _structs(footer, 5)}
        self.row_count = _int(footer, 3)
        groups = _structs(footer, 4)
        if len(groups) > 1 or self.row_count != sum(_int(group, 3) for group in groups):
            raise ParquetError("There is more than one row group, or rows are counted wrongly.")
        self._chunks = [_chunk(column) for group in groups for column in _structs(group, 1)]

    def read(self, limits: Limits) -> dict[str, list[Any]]:
        """All values by column, or ParquetError before more was allocated than the limits allow."""
        if not 0 <= self.row_count <= limits.rows:
            raise ParquetError(f"{self.row_count} rows; {limits.rows} are allowed.")
        if not self._chunks:
            return {column.name: [] for column in self._columns}
        if len(self._chunks) != len(self._columns):
            raise ParquetError("A row group holds other columns than the schema.")
        left_bytes, values = limits.decompressed_bytes, {}
        for column, chunk in zip(self._columns, self._chunks, strict=True):
            pages = list(_walk_pages(self._data, chunk))
            left_bytes -= sum(page.uncompressed_bytes for page in pages)
            count = sum(page.values for page in pages)
            if count != chunk.values or count > limits.values_per_column:
                raise ParquetError(f"{count} values of {column.name}; {limits.values_per_column} are allowed.")
            if left_bytes < 0:
                raise ParquetError(f"More than {limits.decompressed_bytes} bytes decompressed.")
            values[column.name] = _decode(column, pages, chunk.codec)
            if len(values[column.name]) != self.row_count:
                raise ParquetError(f"{column.name} has {len(values[column.name])} rows, not {self.row_count}.")
        return values


def _read_footer(data: memoryview, columns: tuple[Column, ...]) -> Struct:
    if len(data) < len(MAGIC) + TAIL_BYTES or data[:4] != MAGIC or data[-4:] != MAGIC:
        raise ParquetError("This is not a parquet file.")
    size_bytes = int.from_bytes(data[-TAIL_BYTES:-4], "little")
    if size_bytes > min(MAX_FOOTER_BYTES, len(data) - len(MAGIC) - TAIL_BYTES):
        raise ParquetError(f"The footer is larger than the file or {MAX_FOOTER_BYTES} bytes.")
    reader = ThriftReader(data[-TAIL_BYTES - size_bytes : -TAIL_BYTES])
    try:
        return reader.struct(begun=_schema(reader, columns))
    except ThriftError as error:
        raise ParquetError(error.message) from None


_KNOWN_SCHEMAS: dict[tuple[Column, ...], bytes] = {}
"""By the columns the bytes of a schema that has them: one writer begins all of its files with the same ones, and half of the time
that a footer takes to read is theirs."""


def _schema(reader: ThriftReader, columns: tuple[Column, ...]) -> Struct:
    """Fields 1 and 2 of a footer, the version and the schema; without the schema, which has been compared."""
    known = _KNOWN_SCHEMAS.get(columns)
    if known is not None and reader.starts_with(known):
        reader.position = len(known)
    else:
        if not _has_columns(_structs(reader.first_fields(2), 2), columns):
            raise ParquetError("The columns are not the expected ones.")
        _KNOWN_SCHEMAS[columns] = reader.behind
    return {1: 0, 2: []}


def _parse(data: memoryview) -> tuple[Struct, int]:
    reader = ThriftReader(data)
    try:
        return reader.struct(), reader.position
    except ThriftError as error:
        raise ParquetError(error.message) from None


def _has_columns(elements: Sequence[Struct], columns: Sequence[Column]) -> bool:
    """Names, types and nesting agree; annotations, which differ between writers, do not count."""
    expected: list[tuple[Value | None, ...]] = [(None, len(columns))]
    for column in columns:
        name = column.name.encode()
        if column.is_list:
            expected += [(None, 1, REQUIRED, name), (None, 1, REPEATED), (column.kind, None, REQUIRED)]
        else:
            expected.append((column.kind, None, REQUIRED, name))
    found = [tuple(element.get(number) for number in (1, 5, 3, 4)) for element in elements]
    return len(found) == len(expected) and all(
        got[: len(want)] == want for got, want in zip(found, expected, strict=True)
    )


def _chunk(column: Struct) -> _Chunk:
    meta = column.get(3)
    if 1 in column or not isinstance(meta, dict):
        raise ParquetError("A column lies in another file.")
    if meta.get(11) is not None or _int(meta, 4) not in (UNCOMPRESSED, ZSTD):
        raise ParquetError("A column has a dictionary or another compression than zstd.")
    return _Chunk(codec=_int(meta, 4), values=_int(meta, 5), start=_int(meta, 9), size_bytes=_int(meta, 7))


@dataclass(frozen=True)
class _Page:
    values: int
    uncompressed_bytes: int
    body: memoryview


def _walk_pages(data: memoryview, chunk: _Chunk) -> Iterator[_Page]:
    """The pages that tile a chunk, undecoded."""
    if chunk.start < 0 or chunk.size_bytes < 0 or chunk.start + chunk.size_bytes > len(data):
        raise ParquetError("A column lies outside the file.")
    rest = data[chunk.start : chunk.start + chunk.size_bytes]
    for _ in range(MAX_PAGES):
        if not rest:
            return
        header, header_bytes = _parse(rest[:MAX_PAGE_HEADER_BYTES])
        page_bytes = header_bytes + _int(header, 3)
        if not header_bytes <= page_bytes <= len(rest):
            raise ParquetError("A page reaches past the end of its column.")
        yield _page(header, rest[header_bytes:page_bytes])
        rest = rest[page_bytes:]
    raise ParquetError(f"A column has more than {MAX_PAGES} pages.")


def _page(header: Struct, body: memoryview) -> _Page:
    data_header = header.get(5)
    if _int(header, 1) != DATA_PAGE or not isinstance(data_header, dict):
        raise ParquetError("A page is not a data page of version 1.")
    if [_int(data_header, number) for number in (2, 3, 4)] != [PLAIN, RLE, RLE]:
        raise ParquetError("A page is not encoded as plain values under run-length levels.")
    page = _Page(_int(data_header, 1), _int(header, 2), body)
    if min(page.values, page.uncompressed_bytes) < 0:
        raise ParquetError("A page has a negative size.")
    return page


def _decode(column: Column, pages: Sequence[_Page], codec: int) -> list[Any]:
    if not column.is_list:
        return [value for page in pages for value in _plain(column.kind, _decompress(page, codec), page.values)]
    repeats, present, values = [], [], []
    for page in pages:
        body = _decompress(page, codec)
        page_repeats, body = _levels(body, page.values)
        page_present, body = _levels(body, page.values)
        repeats.append(page_repeats)
        present.append(page_present)
        values += _plain(column.kind, body, int(np.count_nonzero(page_present)))
    return _lists(np.concatenate(repeats or [_no_bits()]), np.concatenate(present or [_no_bits()]), values)


def _no_bits() -> Bits:
    return np.zeros(0, np.uint8)


def _lists(repeats: Bits, present: Bits, values: list[Any]) -> list[list[Any]]:
    """Cuts the values of a column into rows: each entry with repetition 0 begins one, and may be the mark of an empty list."""
    if len(repeats) and repeats[0]:
        raise ParquetError("A column begins in the middle of a row.")
    bounds = np.append(np.flatnonzero(repeats == 0), len(repeats))
    if len(values) == len(present):
        return [values[start:end] for start, end in pairwise(bounds.tolist())]
    absent = np.flatnonzero(present == 0)
    if not np.isin(absent, bounds[:-1][np.diff(bounds) == 1]).all():
        raise ParquetError("A list has an absent element.")
    offsets = np.concatenate([[0], np.cumsum(present, dtype=np.int64)])[bounds].tolist()
    return [values[start:end] for start, end in pairwise(offsets)]


def _decompress(page: _Page, codec: int) -> memoryview:
    body = _unzstd(page.body, page.uncompressed_bytes) if codec == ZSTD else page.body
    if len(body) != page.uncompressed_bytes:
        raise ParquetError("A page has another size than its header says.")
    return body


def _unzstd(data: memoryview, size_bytes: int) -> memoryview:
    if not size_bytes:
        return memoryview(b"")
    try:
        frame = zstandard.get_frame_parameters(data)
        known = frame.content_size != zstandard.CONTENTSIZE_UNKNOWN
        # The library allocates what the frame asks for, whatever the limit.
        if (known and frame.content_size != size_bytes) or frame.window_size > max(size_bytes, MAX_WINDOW_BYTES):
            raise ParquetError("A page has another size than its header says.")
        plain = _decompressor().decompress(data, max_output_size=size_bytes, allow_extra_data=False)
        return memoryview(plain)
    except zstandard.ZstdError as error:
        raise ParquetError(f"A page cannot be decompressed: {error}") from None


_of_thread = threading.local()


def _decompressor() -> zstandard.ZstdDecompressor:
    """One per thread, which none may share: to make one costs three times what it does for a page."""
    if not hasattr(_of_thread, "decompressor"):
        _of_thread.decompressor = zstandard.ZstdDecompressor()
    found: zstandard.ZstdDecompressor = _of_thread.decompressor
    return found


def _levels(body: memoryview, count: int) -> tuple[Bits, memoryview]:
    """`count` one-bit levels in the run-length/bit-packed hybrid, and what follows them."""
    size_bytes = int.from_bytes(body[:4], "little")
    if len(body) < 4 + size_bytes:
        raise ParquetError("Levels reach past the end of their page.")
    return np.frombuffer(_unrolled(bytes(body[4 : 4 + size_bytes]), count), np.uint8), body[4 + size_bytes :]


@lru_cache(maxsize=4)  # tokens and their log-probabilities have equal levels; two other ones lie between them
def _unrolled(data: bytes, count: int) -> bytes:
    """Nearly all runs are of two bytes, one row's ones or eight packed levels, and there are two of them in every row."""
    levels, position, left = list[bytes](), 0, count
    while left > 0:
        lead, level = data[position : position + 2] if position + 1 < len(data) else (0x80, 0)
        if lead == _EIGHT_PACKED:
            run, position = _UNPACKED[level], position + 2
        elif level < 2 and not lead & 0x81:
            run, position = _RUNS[level][: lead >> 1], position + 2
        else:
            run, position = _any_run(data, position, left)
        if not run:
            raise ParquetError("Levels end too early.")
        levels.append(run)
        left -= len(run)
    return b"".join(levels)[:count]


def _any_run(data: bytes, position: int, left: int) -> tuple[bytes, int]:
    lead, position = _run_header(data, position)
    if lead & 1:
        packed = data[position : position + min(lead >> 1, -(-left // 8))]
        return b"".join([_UNPACKED[byte] for byte in packed]), position + len(packed)
    level = data[position : position + 1]
    if level not in (b"\0", b"\1"):
        raise ParquetError("A level is neither 0 nor 1.")
    return level * min(lead >> 1, left), position + 1


def _run_header(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 35, 7):
        if position >= len(data):
            raise ParquetError("Levels end too early.")
        value |= (data[position] & 0x7F) << shift
        position += 1
        if data[position - 1] < 0x80:
            return value, position
    raise ParquetError("A run of levels is too long.")


def _plain(kind: Kind, body: memoryview, count: int) -> list[Any]:
    if kind is Kind.BYTES:
        return _byte_strings(body, count)
    if len(body) != count * NUMBERS[kind].itemsize:
        raise ParquetError("A page holds more or fewer values than its header says.")
    values: list[Any] = np.frombuffer(body, NUMBERS[kind]).tolist()
    return values


def _byte_strings(body: memoryview, count: int) -> list[bytes]:
    data, values, position = bytes(body), [], 0
    for _ in range(count):
        end = position + 4 + int.from_bytes(data[position : position + 4], "little")
        if end > len(data):
            raise ParquetError("A value reaches past the end of its page.")
        values.append(data[position + 4 : end])
        position = end
    if position != len(data):
        raise ParquetError("A page holds more or fewer values than its header says.")
    return values


def _int(fields: Struct, number: int) -> int:
    value = fields.get(number)
    if type(value) is not int:
        raise ParquetError("The metadata lacks a number.")
    return value


def _bytes(fields: Struct, number: int) -> bytes:
    value = fields.get(number)
    if not isinstance(value, bytes):
        raise ParquetError("The metadata lacks a text.")
    return value


def _structs(fields: Struct, number: int) -> list[dict[int, Value]]:
    values = fields.get(number, [])
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ParquetError("The metadata lacks a list.")
    return values  # type: ignore[return-value]  # checked above
