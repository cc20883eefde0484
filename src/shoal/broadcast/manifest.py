"""What a policy version is on the wire: head, manifest, and the limits that every reader enforces before it allocates.

A version is one manifest: its tensors in order, the digest of each, and one or two *encodings* in which the bytes can be fetched
(`full`, or `delta` against a named base). An adapter also names the frozen weights that it belongs to. Head and manifest are signed
envelopes; a manifest's digest is that of the served bytes. Every size is checked against another before it is used.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shoal.broadcast.codec.pieces import ITEM_BYTES, block_bytes, partition
from shoal.errors import IntegrityError
from shoal.files import Digest
from shoal.identity import DESCRIPTOR_KIND, Envelope, Keypair

MAX_SHARD_BYTES = 64 << 20
MAX_TENSORS = 100_000
MAX_SHARDS = 1_000_000
MAX_BLOCKS = 1_000_000
MAX_VERSIONS = 1_024
MAX_CHAIN = 1_024
"""Deltas between a version and the full one that it is rebuilt from."""
MAX_FILES = 256
MAX_TOTAL_BYTES = 1 << 43
MAX_HEAD_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 128 << 20
MAX_SPAN_BYTES = 256 << 20
ALIGNMENT = 4096
"""Of the first tensor in a safetensors file, so that disks can be read and written in whole blocks."""

HEAD_KIND = "head"
MANIFEST_KIND = "manifest"

SAFETENSORS_DTYPES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
    "int32": "I32",
    "uint32": "U32",
    "int16": "I16",
    "uint16": "U16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}

Dtype = Literal[
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "int64",
    "uint64",
    "int32",
    "uint32",
    "int16",
    "uint16",
    "int8",
    "uint8",
    "bool",
]
EncodingKind = Literal["full", "delta"]
# "__metadata__" would be read as a header field of the safetensors file that is made from the manifest.
TensorName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-][A-Za-z0-9._/-]{0,254}$")]
Dimension = Annotated[int, Field(ge=0, le=1 << 40)]
Version = Annotated[int, Field(ge=0, lt=1 << 53)]


@dataclass(frozen=True)
class WireTensor:
    """One tensor as it leaves the trainer: raw little-endian bytes, no framework needed to read them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TensorEntry(Record):
    name: TensorName
    dtype: Dtype
    shape: Annotated[tuple[Dimension, ...], Field(max_length=8)]
    digest: Digest

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class ShardEntry(Record):
    digest: Digest
    size_bytes: Annotated[int, Field(gt=0, le=MAX_SHARD_BYTES)]


class BaseRef(Record):
    """The version that a delta applies to."""

    version: Version
    manifest_digest: Digest
    weights_digest: Digest


class AdaptedBase(Record):
    """Frozen weights, published once, that the tensors of a version are an adapter of."""

    manifest_digest: Digest
    weights_digest: Digest


class Encoding(Record):
    """All bytes in order, or changes to a base, block by block (see `codec.pieces`)."""

    kind: EncodingKind
    base: BaseRef | None = None
    shards: Annotated[tuple[ShardEntry, ...], Field(max_length=MAX_SHARDS)]
    span_bytes: Annotated[int, Field(ge=0, le=MAX_SPAN_BYTES)] = 0
    block_bytes: Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(max_length=MAX_BLOCKS)] = ()

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)


class Manifest(Record):
    format: Literal[1] = 1
    run_id: Annotated[str, Field(max_length=128)]
    epoch: Version = 0
    """In which the version was made: after a rewind its number may name other weights."""
    version: Version
    tensors: Annotated[tuple[TensorEntry, ...], Field(max_length=MAX_TENSORS)]
    weights_digest: Digest
    adapts: AdaptedBase | None = None
    """None where the tensors are the whole policy."""
    encodings: Annotated[tuple[Encoding, ...], Field(min_length=1, max_length=2)]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def shards(self) -> tuple[ShardEntry, ...]:
        return tuple(shard for encoding in self.encodings for shard in encoding.shards)

    def encoding(self, kind: EncodingKind) -> Encoding | None:
        return next((encoding for encoding in self.encodings if encoding.kind == kind), None)

    @property
    def required_base(self) -> str | None:
        """Digest of the manifest without which this version cannot be rebuilt."""
        delta = self.encoding("delta")
        if self.encoding("full") is not None or delta is None or delta.base is None:
            return None
        return delta.base.manifest_digest

    @property
    def needs(self) -> tuple[str, ...]:
        """Digests of the manifests without which this version is of no use."""
        adapted = (self.adapts.manifest_digest,) if self.adapts is not None else ()
        return adapted if self.required_base is None else (self.required_base, *adapted)

    @model_validator(mode="after")
    def _sizes_agree(self) -> "Manifest":
        names = {tensor.name for tensor in self.tensors}
        if len(names) != len(self.tensors) or "__metadata__" in names:
            raise ValueError("tensor names must be unique and not reserved")
        if self.size_bytes > MAX_TOTAL_BYTES:
            raise ValueError(f"the tensors claim {self.size_bytes} bytes")
        if self.weights_digest != digest_weights(self.tensors):
            raise ValueError("the weights digest is not that of the tensors")
        if len({encoding.kind for encoding in self.encodings}) != len(self.encodings):
            raise ValueError("each kind of encoding may appear once")
        for encoding in self.encodings:
            self._check_encoding(encoding)
        return self

    def _check_encoding(self, encoding: Encoding) -> None:
        if encoding.kind == "full":
            if encoding.base is not None or encoding.block_bytes or encoding.size_bytes != self.size_bytes:
                raise ValueError("full shards must hold the bytes of all tensors and nothing else")
            return
        if encoding.base is None or encoding.base.version >= self.version:
            raise ValueError("a delta needs an older base")
        if encoding.span_bytes * MAX_BLOCKS < self.size_bytes:
            raise ValueError("a delta has too many blocks")
        blocks = partition(self.tensors, encoding.span_bytes)
        if len(encoding.block_bytes) != len(blocks) or sum(encoding.block_bytes) != encoding.size_bytes:
            raise ValueError("delta shards must hold the blocks of all tensors and nothing else")
        for size, block in zip(encoding.block_bytes, blocks, strict=True):
            if size > len(block) + block_bytes(block):
                raise ValueError("a delta block may not be larger than what it describes")


class VersionEntry(Record):
    version: Version
    manifest_digest: Digest
    epoch: Version = 0


class Head(Record):
    """The newest versions, newest last. The counter only grows, so an older head is never mistaken for a newer one, also where
    the owner returned to an earlier version."""

    format: Literal[1] = 1
    run_id: Annotated[str, Field(max_length=128)]
    counter: Annotated[int, Field(gt=0, lt=1 << 53)]
    epoch: Version = 0
    expires_at: float
    ledger_head: Annotated[str, Field(max_length=2048)]
    """The head of the ledger, as the coordinator signed it."""
    versions: Annotated[tuple[VersionEntry, ...], Field(max_length=MAX_VERSIONS)]
    files: Annotated[tuple[ShardEntry, ...], Field(max_length=MAX_FILES)] = ()

    @property
    def newest(self) -> VersionEntry | None:
        return self.versions[-1] if self.versions else None

    def entry(self, version: int) -> VersionEntry | None:
        return next((entry for entry in self.versions if entry.version == version), None)

    @model_validator(mode="after")
    def _versions_ascend(self) -> "Head":
        numbers = [entry.version for entry in self.versions]
        if numbers != sorted(set(numbers)):
            raise ValueError("versions must ascend")
        epochs = [*(entry.epoch for entry in self.versions), self.epoch]
        if epochs != sorted(epochs):
            raise ValueError("epochs must ascend")
        return self


def digest_weights(tensors: Iterable[TensorEntry]) -> str:
    """One digest over names, types, shapes and contents of all tensors, in order."""
    hasher = blake3()
    for tensor in tensors:
        hasher.update(f"{tensor.name} {tensor.dtype} {list(tensor.shape)} {tensor.digest}\n".encode())
    return hasher.hexdigest()


def seal_head(head: Head, run_key: Keypair) -> bytes:
    return Envelope.seal(HEAD_KIND, head.model_dump_json(), run_key).to_bytes()


def open_head(data: bytes, run_key: str) -> Head:
    return _open(data, HEAD_KIND, run_key, Head)


def seal_manifest(manifest: Manifest, run_key: Keypair) -> bytes:
    return Envelope.seal(MANIFEST_KIND, manifest.model_dump_json(exclude_defaults=True), run_key).to_bytes()


def open_manifest(data: bytes, run_key: str) -> Manifest:
    return _open(data, MANIFEST_KIND, run_key, Manifest)


def descriptor_key(data: bytes, run_key: str | None = None) -> str:
    """The key that signed this run descriptor: `run_key`, if one is known; else the key it names, for the caller to pin."""
    envelope = Envelope.from_bytes(data)
    envelope.open(DESCRIPTOR_KIND, run_key or envelope.key)
    return envelope.key


def safetensors_header(tensors: Sequence[TensorEntry]) -> bytes:
    """The bytes before the first tensor of a safetensors file that holds these tensors in order."""
    fields: dict[str, object] = {}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.size_bytes
        dtype = SAFETENSORS_DTYPES[tensor.dtype]
        fields[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


RecordType = TypeVar("RecordType", bound=Record)


def _open(data: bytes, kind: str, run_key: str, record: type[RecordType]) -> RecordType:
    try:
        payload = Envelope.from_bytes(data).open(kind, run_key)
        return record.model_validate_json(payload)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise IntegrityError(f"The {kind} breaks its format: {where} {first['msg']}.") from None
    except RecursionError:
        raise IntegrityError(f"The {kind} is nested too deeply.") from None
