"""Tasks as an Arrow table: one layout in memory, on disk and for the digest.

A file is memory-mapped, so that opening it costs neither time nor memory by its size. The digest depends on the values of all
rows in order and on nothing else: not on how rows are cut into batches, nor on the release of Arrow.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from shoal.errors import IntegrityError
from shoal.files import atomic_file

TEXT_COLUMNS = ("problem_id", "source", "task_type", "prompt", "verification_info", "metadata")
RATE_COLUMN = "solve_rate"
SCHEMA = pa.schema([(name, pa.large_string()) for name in TEXT_COLUMNS] + [(RATE_COLUMN, pa.float64())])
BATCH_ROWS = 4096
NO_RATE = -1.0
"""A missing solve rate in the digest; a real one is never negative."""

Row = tuple[str, str, str, str, str, str, float | None]


def record_batches(rows: Iterable[Row]) -> Iterator[pa.RecordBatch]:
    remaining = iter(rows)
    while batch := list(islice(remaining, BATCH_ROWS)):
        columns = [pa.array(column, field.type) for column, field in zip(zip(*batch, strict=True), SCHEMA, strict=True)]
        yield pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def make_table(rows: Iterable[Row]) -> pa.Table:
    return pa.Table.from_batches(record_batches(rows), schema=SCHEMA)


def write_table(path: Path, batches: Iterable[pa.RecordBatch]) -> None:
    """Whole or absent, without ever holding more than one batch in memory."""
    with atomic_file(path) as file, pa.ipc.new_file(file, SCHEMA) as writer:
        for batch in batches:
            writer.write_batch(batch)


def open_table(path: Path) -> pa.Table:
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise IntegrityError(f"{path} is not a file of tasks: {error}.") from None
    if not table.schema.equals(SCHEMA):
        raise IntegrityError(f"{path} is an Arrow file, but not one of tasks.")
    return table


def digest_table(table: pa.Table) -> str:
    """64 hex digits over the lengths and the bytes of every column."""
    whole = blake3(len(table).to_bytes(8, "little"))
    for name in TEXT_COLUMNS:
        whole.update(_digest_text(table.column(name)))
    rates = pc.fill_null(table.column(RATE_COLUMN), NO_RATE)
    whole.update(b"".join(_little_endian(chunk.to_numpy(), "<f8") for chunk in rates.chunks))
    return whole.hexdigest()


def _digest_text(column: pa.ChunkedArray) -> bytes:
    lengths, text = blake3(), blake3()
    for chunk in column.chunks:
        offsets = np.frombuffer(chunk.buffers()[1], np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
        lengths.update(_little_endian(np.diff(offsets), "<i8"))
        if len(chunk) and offsets[-1] > offsets[0]:
            text.update(memoryview(chunk.buffers()[2])[offsets[0] : offsets[-1]])
    return lengths.digest() + text.digest()


def _little_endian(values: np.ndarray, kind: str) -> bytes:
    return np.ascontiguousarray(values, kind).tobytes()
