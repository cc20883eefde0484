import random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.protocol.parquet.reader import MAX_FOOTER_BYTES
from shoal.protocol.rollouts import (
    HEADER_KEY,
    WRITER_OPTIONS,
    Rollout,
    RolloutFileError,
    RolloutLimits,
    read_rollouts,
    write_rollouts,
)
from support.samples import descriptor, header, rollout

LIMITS = RolloutLimits.of(descriptor())
ROLLOUTS = [rollout(group, sample) for group in range(2) for sample in range(2)]
GOOD = write_rollouts(header(), ROLLOUTS)
SCHEMA = pq.read_schema(pa.BufferReader(GOOD)).remove_metadata()


def columns(rollouts: list[Rollout]) -> dict[str, list[object]]:
    return {name: [getattr(one, name) for one in rollouts] for name in SCHEMA.names}


def parquet(table: pa.Table, meta: dict[bytes, bytes] | None = None, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, **WRITER_OPTIONS | options) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({HEADER_KEY: header().model_dump_json().encode()} if meta is None else meta)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def with_columns(**changes: Any) -> bytes:
    return parquet(pa.table(columns(ROLLOUTS) | changes, schema=SCHEMA))


def refused(data: bytes, match: str = ".") -> None:
    with pytest.raises(RolloutFileError, match=match):
        read_rollouts(data, LIMITS)


def replace_in_footer(data: bytes, old: int, new: int) -> bytes:
    """The file with one number of its footer changed, in place."""

    def varint(value: int, width: int = 0) -> bytes:
        parts: list[int] = []
        left = value << 1
        while left >= 0x80 or len(parts) + 1 < width:
            parts.append(left & 0x7F | 0x80)
            left >>= 7
        return bytes([*parts, left])

    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    before = varint(old)
    assert before in data[start:]
    return data[:start] + data[start:].replace(before, varint(new, len(before)))


def test_what_is_written_is_read_back() -> None:
    found, rows = read_rollouts(GOOD, LIMITS)
    assert (found, rows) == (header(), ROLLOUTS)


def test_any_parquet_tool_reads_the_same() -> None:
    table = pq.read_table(pa.BufferReader(GOOD))
    assert table.to_pydict() == columns(ROLLOUTS)
    assert table.schema.field("task_id").type == pa.string()


def test_an_honest_file_of_the_largest_size_fits_the_limits() -> None:
    rows = LIMITS.rows
    largest = [
        Rollout(
            task_id="t" * 200,
            group=index,
            sample=0,
            input_tokens=[2**31 - 1] * LIMITS.prompt_tokens,
            output_tokens=[random.Random(index).randrange(2**31) for _ in range(LIMITS.output_tokens)],
            segment_lengths=[LIMITS.output_tokens],
            output_logprobs=[-1.5] * LIMITS.output_tokens,
            target_length=1,
            task_reward=0.0,
            length_penalty=0.0,
            reward=0.0,
            finish_reason="length",
            proofs=[random.Random(chunk).randbytes(258) for chunk in range(2)],
        )
        for index in range(rows)
    ]
    assert read_rollouts(write_rollouts(header(), largest), LIMITS)[1] == largest


def test_a_file_without_rows_is_empty_not_broken() -> None:
    assert read_rollouts(write_rollouts(header(), []), LIMITS)[1] == []


def test_limits_follow_from_the_descriptor() -> None:
    assert RolloutLimits(rows=4, prompt_tokens=16, output_tokens=40, proof_bytes=2 * 258) == LIMITS


@pytest.mark.parametrize(
    "data", [b"", b"PAR1", b"PAR1PAR1", b"not parquet at all", GOOD[:-1], GOOD[1:], GOOD[: len(GOOD) // 2]]
)
def test_bytes_that_are_no_parquet_are_refused(data: bytes) -> None:
    refused(data)


def test_too_many_rows_are_refused() -> None:
    refused(write_rollouts(header(), [*ROLLOUTS, rollout()]), "5 rows")


def test_a_hundred_thousand_rows_are_refused_by_their_number() -> None:
    rows = 100_000

    def repeated(field: pa.Field) -> pa.Array:
        if pa.types.is_list(field.type):
            return pa.ListArray.from_arrays(pa.array([0] * (rows + 1), pa.int32()), pa.array([], field.type.value_type))
        return pa.repeat(pa.scalar("" if field.type == pa.string() else 0, field.type), rows)

    refused(parquet(pa.table([repeated(field).cast(field.type) for field in SCHEMA], schema=SCHEMA)), "100000 rows")


def test_several_row_groups_are_refused() -> None:
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, SCHEMA, **WRITER_OPTIONS) as writer:
        for one in ROLLOUTS[:2]:
            writer.write_table(pa.table(columns([one]), schema=SCHEMA))
        writer.add_key_value_metadata({HEADER_KEY: header().model_dump_json().encode()})
    refused(sink.getvalue().to_pybytes(), "more than one row group")


@pytest.mark.parametrize(
    "change",
    [
        {"output_tokens": [[7] * 200, [], [], []]},
        {"output_logprobs": [[-1.0] * 161, [], [], []]},
        {"input_tokens": [[1] * 161, [], [], []]},
        {"proofs": [[b""] * 161, [], [], []]},
    ],
)
def test_too_many_values_in_a_column_are_refused(change: dict[str, Any]) -> None:
    refused(with_columns(**change), "values of ")


@pytest.mark.parametrize("change", [{"task_id": ["x" * 100_000] * 4}, {"proofs": [[b"\0" * 100_000]] * 4}])
def test_huge_strings_are_refused_however_well_they_compress(change: dict[str, Any]) -> None:
    data = with_columns(**change)
    assert len(data) < 10_000
    refused(data, "bytes decompressed")


def test_dictionaries_are_refused_because_they_multiply() -> None:
    refused(parquet(pa.table(columns(ROLLOUTS), schema=SCHEMA), use_dictionary=True), "dictionary")


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_deltas_are_refused_because_they_multiply(encoding: str) -> None:
    refused(parquet(pa.table(columns(ROLLOUTS), schema=SCHEMA), column_encoding={"task_id": encoding}), "plain values")


@pytest.mark.parametrize("compression", ["snappy", "gzip", "brotli", "lz4"])
def test_other_compressions_are_refused(compression: str) -> None:
    refused(parquet(pa.table(columns(ROLLOUTS), schema=SCHEMA), compression=compression), "zstd")


def test_newer_pages_are_refused() -> None:
    refused(parquet(pa.table(columns(ROLLOUTS), schema=SCHEMA), data_page_version="2.0"), "data page of version 1")


def test_a_footer_that_hides_values_is_found_by_walking_the_pages() -> None:
    data = with_columns(output_tokens=[[7] * 1000, [], [], []])
    refused(replace_in_footer(data, 1003, 40), "1003 values of output_tokens")


def test_a_footer_that_hides_rows_is_refused() -> None:
    refused(replace_in_footer(write_rollouts(header(), [rollout()] * 100), 100, 2))


def test_a_column_outside_the_file_is_refused() -> None:
    column = pq.ParquetFile(pa.BufferReader(GOOD)).metadata.row_group(0).column(11)
    refused(replace_in_footer(GOOD, column.data_page_offset, 8191), "outside the file")


@pytest.mark.parametrize("name", SCHEMA.names)
def test_every_column_must_be_there(name: str) -> None:
    refused(parquet(pa.table(columns(ROLLOUTS), schema=SCHEMA).drop_columns([name])), "columns")


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.float32(), pa.timestamp("us"), pa.list_(pa.int32()), pa.bool_(), pa.string()], ids=str
)
def test_every_column_has_its_type(kind: pa.DataType) -> None:
    fields = [pa.field("group", kind, nullable=False) if field.name == "group" else field for field in SCHEMA]
    values = columns(ROLLOUTS) | {"group": pa.array([0] * 4).cast(kind) if not pa.types.is_list(kind) else [[0]] * 4}
    refused(parquet(pa.table(values, schema=pa.schema(fields))), "columns")


def test_columns_that_may_be_null_are_refused() -> None:
    fields = [field.with_nullable(True) if field.name == "output_tokens" else field for field in SCHEMA]
    values = columns(ROLLOUTS) | {"output_tokens": [None, [1], [2], [3]]}
    refused(parquet(pa.table(values, schema=pa.schema(fields))), "columns")


def test_surplus_and_doubled_columns_are_refused() -> None:
    table = pa.table(columns(ROLLOUTS), schema=SCHEMA)
    for name in ("extra", "group"):
        surplus = table.append_column(pa.field(name, pa.int32(), nullable=False), pa.array([0] * 4, pa.int32()))
        refused(parquet(surplus), "columns")


def test_text_that_is_no_unicode_is_refused() -> None:
    refused(with_columns(task_id=["abcdefgh"] * 4).replace(b"abcdefgh", b"\xff\xfeabcdef"), "UTF-8")


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {HEADER_KEY: b"not json"},
        {HEADER_KEY: b"\xff"},
        {HEADER_KEY: header().model_dump_json().replace("slot", "sloth").encode()},
        {HEADER_KEY: header(format=2).model_dump_json().encode()},
    ],
)
def test_a_file_without_a_valid_header_is_refused(meta: dict[bytes, bytes]) -> None:
    refused(parquet(pa.table(columns(ROLLOUTS), schema=SCHEMA), meta), "header|format 2")


def test_a_footer_of_unusual_size_is_not_parsed() -> None:
    meta = {HEADER_KEY: header().model_dump_json().encode(), b"ballast": b"x" * MAX_FOOTER_BYTES}
    refused(parquet(pa.table(columns(ROLLOUTS), schema=SCHEMA), meta), "footer is larger")


def test_a_schema_nested_too_deep_is_refused() -> None:
    kind: pa.DataType = pa.int32()
    for _ in range(40):
        kind = pa.list_(kind)
    refused(parquet(pa.table({"task_id": pa.array([], kind)})), "columns")


def survives(data: bytes) -> None:
    """Reads hostile bytes: a refusal, or rows inside the limits."""
    try:
        _, rows = read_rollouts(data, LIMITS)
    except RolloutFileError:
        return
    assert len(rows) <= LIMITS.rows
    for name in ("input_tokens", "output_tokens", "output_logprobs", "proofs"):
        assert sum(len(getattr(row, name)) for row in rows) <= LIMITS.in_parquet.values_per_column


mutations = st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=8)


def mutated(changes: list[tuple[int, int]]) -> bytes:
    data = bytearray(GOOD)
    for position, value in changes:
        data[position] = value
    return bytes(data)


@given(mutations)
@settings(max_examples=150)
def test_flipped_bytes_are_refused_or_harmless(changes: list[tuple[int, int]]) -> None:
    survives(mutated(changes))


@given(st.integers(0, len(GOOD)), st.integers(0, len(GOOD)), st.binary(max_size=64))
def test_cut_and_spliced_files_are_refused_or_harmless(start: int, stop: int, filling: bytes) -> None:
    survives(GOOD[:start] + filling + GOOD[stop:])


@pytest.mark.slow
@given(mutations)
@settings(max_examples=10_000)
def test_ten_thousand_flipped_files_are_refused_or_harmless(changes: list[tuple[int, int]]) -> None:
    survives(mutated(changes))


@pytest.mark.parametrize(
    ("lengths", "match"),
    [([], "0 segments"), ([2, 3], "2 segments"), ([5, 0, 0], "0 tokens"), ([7, -1, -1], "-1 tokens"), ([4], "for 5")],
)
def test_a_row_whose_segments_are_not_those_of_its_tokens_is_refused(lengths: list[int], match: str) -> None:
    refused(with_columns(segment_lengths=[[5], [5], lengths, [5]]), f"Row 2 .*{match}")


def test_more_segments_than_tokens_can_have_are_refused_by_their_number() -> None:
    refused(with_columns(segment_lengths=[[1] * 161, [5], [5], [5]]), "161|164")
