"""The rollout file: parquet with zstd, one row per completion, complete groups, signed as a whole.

Everything a reader will materialise is bounded first, from the footer: rows, values per column, decompressed bytes, column
types. Rewards and log-probabilities in the file are claims of the worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.errors import IntegrityError
from shoal.protocol.descriptor import RunDescriptor

FORMAT_VERSION = 1
HEADER_KEY = b"shoal"
FIXED_ROW_BYTES = 4096
PROOF_HEADER_BYTES = 2
PROOF_VALUE_BYTES = 2


def _list_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


SCHEMA = pa.schema(
    [
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("input_tokens", _list_of(pa.int32()), nullable=False),
        pa.field("output_tokens", _list_of(pa.int32()), nullable=False),
        pa.field("output_logprobs", _list_of(pa.float32()), nullable=False),
        pa.field("target_length", pa.int32(), nullable=False),
        pa.field("task_reward", pa.float64(), nullable=False),
        pa.field("length_penalty", pa.float64(), nullable=False),
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("proofs", _list_of(pa.binary()), nullable=False),
    ]
)


class RolloutFileError(IntegrityError):
    code = "rollout_file"


class RolloutHeader(BaseModel):
    """Who made the file, for which lease, with which policy."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: int = FORMAT_VERSION
    run_id: str
    step: int
    slot: int
    lease_id: str
    worker_key: str
    policy_version: int
    manifest_digest: str
    engine: str
    numerics_class: str


@dataclass(frozen=True)
class Rollout:
    """One completion; fields as in DESIGN 3.3."""

    task_id: str
    group: int
    sample: int
    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    target_length: int
    task_reward: float
    length_penalty: float
    reward: float
    finish_reason: str
    proofs: list[bytes]


@dataclass(frozen=True)
class RolloutLimits:
    """The most a file of this run can honestly hold."""

    rows: int
    prompt_tokens: int
    output_tokens: int
    proof_bytes: int

    @classmethod
    def of(cls, descriptor: RunDescriptor) -> "RolloutLimits":
        rollouts = descriptor.rollouts
        chunks = -(-rollouts.max_new_tokens // descriptor.chunk_tokens)
        return cls(
            rows=rollouts.tasks_per_slot * rollouts.group_size,
            prompt_tokens=rollouts.max_prompt_tokens,
            output_tokens=rollouts.max_new_tokens,
            proof_bytes=chunks * (PROOF_HEADER_BYTES + PROOF_VALUE_BYTES * descriptor.top_k),
        )

    @property
    def values_per_column(self) -> int:
        return self.rows * max(self.prompt_tokens, self.output_tokens, 1)

    @property
    def decompressed_bytes(self) -> int:
        # Ids and claims are 4 bytes each, with as much again for levels and offsets.
        per_row = FIXED_ROW_BYTES + 8 * self.prompt_tokens + 16 * self.output_tokens + 2 * self.proof_bytes
        return self.rows * per_row


def write_rollouts(header: RolloutHeader, rollouts: Sequence[Rollout]) -> bytes:
    columns = {name: [getattr(rollout, name) for rollout in rollouts] for name in SCHEMA.names}
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, SCHEMA, compression="zstd", store_schema=False) as writer:
        writer.write_table(pa.table(columns, schema=SCHEMA))
        writer.add_key_value_metadata({HEADER_KEY: header.model_dump_json().encode()})
    data: bytes = sink.getvalue().to_pybytes()
    return data


def read_header(data: bytes) -> RolloutHeader:
    return _header(_open(data))


def read_rollouts(data: bytes, limits: RolloutLimits) -> tuple[RolloutHeader, list[Rollout]]:
    """Header and rows, or RolloutFileError before anything large was allocated."""
    file = _open(data)
    header = _header(file)
    _check_bounds(file.metadata, limits)
    if not file.schema_arrow.equals(SCHEMA, check_metadata=False):
        raise RolloutFileError("The columns are not those of a rollout file.")
    try:
        columns = file.read(use_threads=False).to_pydict()
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise RolloutFileError(f"The rollout file cannot be decoded: {str(error)[:200]}") from None
    rows = [Rollout(*values) for values in zip(*(columns[name] for name in SCHEMA.names), strict=True)]
    if any(None in (row.input_tokens, row.output_tokens, row.output_logprobs, row.proofs) for row in rows):
        raise RolloutFileError("A rollout file has no empty fields.")
    return header, rows


def _open(data: bytes) -> Any:
    try:
        return pq.ParquetFile(
            pa.BufferReader(data), thrift_string_size_limit=1 << 20, thrift_container_size_limit=10_000
        )
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RolloutFileError(f"This is not a parquet file: {str(error)[:200]}") from None


def _header(file: Any) -> RolloutHeader:
    raw = (file.metadata.metadata or {}).get(HEADER_KEY, b"")
    try:
        header = RolloutHeader.model_validate_json(raw)
    except ValidationError:
        raise RolloutFileError("The rollout file has no valid header.") from None
    if header.format != FORMAT_VERSION:
        raise RolloutFileError(f"Rollout format {header.format} is not the supported {FORMAT_VERSION}.")
    return header


def _check_bounds(metadata: Any, limits: RolloutLimits) -> None:
    if metadata.num_rows > limits.rows or metadata.num_row_groups > 1:
        raise RolloutFileError(
            f"{metadata.num_rows} rows in {metadata.num_row_groups} groups; {limits.rows} are allowed."
        )
    if metadata.num_columns != len(SCHEMA):
        raise RolloutFileError("The columns are not those of a rollout file.")
    total_bytes = 0
    for group in range(metadata.num_row_groups):
        columns = [metadata.row_group(group).column(index) for index in range(metadata.num_columns)]
        total_bytes += sum(column.total_uncompressed_size for column in columns)
        if any(column.num_values > limits.values_per_column for column in columns):
            raise RolloutFileError(f"A column holds more than {limits.values_per_column} values.")
    if total_bytes > limits.decompressed_bytes:
        raise RolloutFileError(f"{total_bytes} bytes decompressed; {limits.decompressed_bytes} are allowed.")
