"""The rollout file: parquet with zstd, one row per completion, complete groups, signed as a whole.

Any parquet tool can read it; we read it with our own strict reader, which bounds rows, values per column, decompressed bytes
and column types before anything is materialised. A row is a row of segments (`segments`); log-probabilities and proofs are of its
sampled tokens only. Rewards and log-probabilities in the file are claims of the worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.config import RolloutConfig
from shoal.errors import IntegrityError
from shoal.protocol.descriptor import RunDescriptor
from shoal.protocol.environments import longest_row
from shoal.protocol.parquet.reader import Column, Kind, Limits, ParquetError, ParquetFile
from shoal.protocol.segments import sampled_count, sampled_values, segment_complaint
from shoal.protocol.steps import StepId

FORMAT_VERSION = 1
HEADER_KEY = b"shoal"
FIXED_ROW_BYTES = 4096
FOOTER_BYTES = 256 << 10
"""Schema, header, offsets, and what compression adds to values that it cannot shorten."""
PROOF_HEADER_BYTES = 2
PROOF_VALUE_BYTES = 2

COLUMNS = (
    Column("task_id", Kind.BYTES),
    Column("group", Kind.INT32),
    Column("sample", Kind.INT32),
    Column("input_tokens", Kind.INT32, is_list=True),
    Column("output_tokens", Kind.INT32, is_list=True),
    Column("segment_lengths", Kind.INT32, is_list=True),
    Column("output_logprobs", Kind.FLOAT, is_list=True),
    Column("target_length", Kind.INT32),
    Column("task_reward", Kind.DOUBLE),
    Column("length_penalty", Kind.DOUBLE),
    Column("reward", Kind.DOUBLE),
    Column("finish_reason", Kind.BYTES),
    Column("proofs", Kind.BYTES, is_list=True),
)
TEXT_COLUMNS = ("task_id", "finish_reason")


class RolloutFileError(IntegrityError):
    """Bytes that are no rollout file of the run."""

    code = "rollout_file"


class RolloutHeader(BaseModel):
    """Who made the file, for which lease, with which policy."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: int = FORMAT_VERSION
    run_id: str
    epoch: int = 0
    step: int
    attempt: int = 0
    slot: int
    lease_id: str
    worker_key: str
    policy_version: int
    manifest_digest: str
    numerics_class: str

    @property
    def step_id(self) -> StepId:
        return StepId(self.epoch, self.step, self.attempt)


TRUNCATED = frozenset({"length", "context"})
"""Finish reasons of completions that reached a limit before they ended."""


@dataclass(frozen=True)
class Rollout:
    """One completion with the worker's claims about it."""

    task_id: str
    group: int
    sample: int
    input_tokens: list[int]
    output_tokens: list[int]
    segment_lengths: list[int]
    """Alternately sampled by the policy and given by an environment; a plain completion has one."""
    output_logprobs: list[float]
    """Of sampled tokens, as are the proofs."""
    target_length: int
    task_reward: float
    length_penalty: float
    reward: float
    finish_reason: str
    proofs: list[bytes]

    @property
    def sampled_count(self) -> int:
        return sampled_count(self.segment_lengths)

    @property
    def sampled_tokens(self) -> list[int]:
        return sampled_values(self.output_tokens, self.segment_lengths)


@dataclass(frozen=True)
class RolloutLimits:
    """The most a file of this run can honestly hold."""

    rows: int
    prompt_tokens: int
    output_tokens: int
    proof_bytes: int
    segments: int = 1

    @classmethod
    def of(cls, descriptor: RunDescriptor) -> "RolloutLimits":
        segments = longest_row(descriptor.environments)
        return cls.for_settings(descriptor.rollouts, descriptor.chunk_tokens, descriptor.top_k, segments)

    @classmethod
    def for_settings(cls, rollouts: RolloutConfig, chunk_tokens: int, top_k: int, segments: int = 1) -> "RolloutLimits":
        chunks = -(-rollouts.max_new_tokens // chunk_tokens)
        return cls(
            rows=rollouts.tasks_per_slot * rollouts.group_size,
            prompt_tokens=rollouts.max_prompt_tokens,
            output_tokens=rollouts.max_new_tokens,
            proof_bytes=chunks * (PROOF_HEADER_BYTES + PROOF_VALUE_BYTES * top_k),
            segments=segments,
        )

    @property
    def in_parquet(self) -> Limits:
        # Ids and claims are 4 bytes each, with as much again for levels and lengths.
        per_row = FIXED_ROW_BYTES + 8 * (self.prompt_tokens + 2 * self.output_tokens + self.segments)
        most_values = max(self.prompt_tokens, self.output_tokens, self.segments)
        return Limits(self.rows, self.rows * most_values, self.rows * (per_row + 2 * self.proof_bytes))

    @property
    def file_bytes(self) -> int:
        """No honest file is larger: its reader would refuse what it decompresses to."""
        return self.in_parquet.decompressed_bytes + FOOTER_BYTES


def write_rollouts(header: RolloutHeader, rollouts: Sequence[Rollout]) -> bytes:
    import pyarrow as pa  # only workers write, and it weighs more than the rest of this package
    import pyarrow.parquet as pq

    schema = _arrow_schema()
    columns = {name: [getattr(rollout, name) for rollout in rollouts] for name in schema.names}
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, **WRITER_OPTIONS) as writer:
        writer.write_table(pa.table(columns, schema=schema))
        writer.add_key_value_metadata({HEADER_KEY: header.model_dump_json().encode()})
    data: bytes = sink.getvalue().to_pybytes()
    return data


WRITER_OPTIONS = {
    "compression": "zstd",
    "store_schema": False,
    "use_dictionary": False,
    "write_statistics": False,
    "version": "1.0",
    "data_page_version": "1.0",
}
"""What the strict reader accepts, and what every reader of parquet understands."""


def _arrow_schema() -> Any:
    import pyarrow as pa

    kinds = {Kind.INT32: pa.int32(), Kind.FLOAT: pa.float32(), Kind.DOUBLE: pa.float64(), Kind.BYTES: pa.binary()}

    def field(column: Column) -> Any:
        kind = pa.string() if column.name in TEXT_COLUMNS else kinds[column.kind]
        if column.is_list:
            kind = pa.list_(pa.field("element", kind, nullable=False))
        return pa.field(column.name, kind, nullable=False)

    return pa.schema([field(column) for column in COLUMNS])


def read_rollouts(data: bytes, limits: RolloutLimits) -> tuple[RolloutHeader, list[Rollout]]:
    """Header and rows, or RolloutFileError before anything large was allocated."""
    try:
        file = ParquetFile(data, COLUMNS)
        header = _header(file.metadata)
        columns = file.read(limits.in_parquet)
        _check_segments(columns["segment_lengths"], columns["output_tokens"])
        for name in TEXT_COLUMNS:
            columns[name] = [text.decode() for text in columns[name]]
    except ParquetError as error:
        raise RolloutFileError(error.message) from None
    except UnicodeDecodeError:
        raise RolloutFileError("A text is not UTF-8.") from None
    return header, [Rollout(*values) for values in zip(*columns.values(), strict=True)]


def _check_segments(lengths: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
    for number, (segments, tokens) in enumerate(zip(lengths, outputs, strict=True)):
        if complaint := segment_complaint(segments, len(tokens)):
            raise RolloutFileError(f"Row {number} {complaint}.")


def _header(metadata: dict[bytes, bytes]) -> RolloutHeader:
    try:
        header = RolloutHeader.model_validate_json(metadata.get(HEADER_KEY, b""))
    except ValidationError:
        raise RolloutFileError("The rollout file has no valid header.") from None
    if header.format != FORMAT_VERSION:
        raise RolloutFileError(f"Rollout format {header.format} is not the supported {FORMAT_VERSION}.")
    return header
