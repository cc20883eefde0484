"""What a policy version is on the wire: head, manifest, and the limits that every reader enforces before it allocates.

A version is one manifest: its tensors in order, the digest of each, and one or two *forms* in which the bytes can be had
(`full`, or `delta` against a named base). Head and manifest travel as signed envelopes; a manifest's digest is that of the
served bytes. Nothing here trusts a number that it has not compared with another one.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shoal.broadcast.codec.pieces import ITEM_BYTES, block_bytes, partition
from shoal.errors import IntegrityError, SignatureError
from shoal.identity import Envelope, Keypair

MAX_SHARD_BYTES = 64 << 20
MAX_TENSORS = 100_000
MAX_SHARDS = 1_000_000
MAX_BLOCKS = 1_000_000
MAX_VERSIONS = 1_024
MAX_FILES = 256
MAX_TOTAL_BYTES = 1 << 43
MAX_HEAD_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 128 << 20
MAX_DESCRIPTOR_BYTES = 4 << 20
MAX_SPAN_BYTES = 256 << 20

HEAD_KIND = "head"
MANIFEST_KIND = "manifest"

SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

Dtype = Literal["bfloat16", "float16", "float32"]
FormKind = Literal["full", "delta"]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
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
    """The version that a delta applies to, and nothing else."""

    version: Version
    manifest_digest: Digest
    weights_digest: Digest


class Form(Record):
    """One way to the bytes: all of them in order, or changes to a base, block by block (see `pieces`)."""

    kind: FormKind
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
    version: Version
    tensors: Annotated[tuple[TensorEntry, ...], Field(max_length=MAX_TENSORS)]
    weights_digest: Digest
    forms: Annotated[tuple[Form, ...], Field(min_length=1, max_length=2)]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def shards(self) -> tuple[ShardEntry, ...]:
        return tuple(shard for form in self.forms for shard in form.shards)

    def form(self, kind: FormKind) -> Form | None:
        return next((form for form in self.forms if form.kind == kind), None)

    @model_validator(mode="after")
    def _sizes_agree(self) -> "Manifest":
        names = {tensor.name for tensor in self.tensors}
        if len(names) != len(self.tensors) or "__metadata__" in names:
            raise ValueError("tensor names must be unique and not reserved")
        if self.size_bytes > MAX_TOTAL_BYTES:
            raise ValueError(f"the tensors claim {self.size_bytes} bytes")
        if self.weights_digest != digest_weights(self.tensors):
            raise ValueError("the weights digest is not that of the tensors")
        if len({form.kind for form in self.forms}) != len(self.forms):
            raise ValueError("each kind of form may appear once")
        for form in self.forms:
            self._check_form(form)
        return self

    def _check_form(self, form: Form) -> None:
        if form.kind == "full":
            if form.base is not None or form.block_bytes or form.size_bytes != self.size_bytes:
                raise ValueError("full shards must hold the bytes of all tensors and nothing else")
            return
        if form.base is None or form.base.version >= self.version:
            raise ValueError("a delta needs an older base")
        if form.span_bytes * MAX_BLOCKS < self.size_bytes:
            raise ValueError("a delta may not have so many blocks")
        blocks = partition(self.tensors, form.span_bytes)
        if len(form.block_bytes) != len(blocks) or sum(form.block_bytes) != form.size_bytes:
            raise ValueError("delta shards must hold the blocks of all tensors and nothing else")
        for size, block in zip(form.block_bytes, blocks, strict=True):
            if size > len(block) + block_bytes(block):
                raise ValueError("a delta block may not be larger than what it describes")


class VersionEntry(Record):
    version: Version
    manifest_digest: Digest


class Head(Record):
    """The newest versions, newest last. The counter only grows, so an older head is never mistaken for a newer one."""

    format: Literal[1] = 1
    run_id: Annotated[str, Field(max_length=128)]
    counter: Annotated[int, Field(gt=0, lt=1 << 53)]
    expires_at: float
    ledger_head: Annotated[str, Field(max_length=128)]
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


def open_descriptor(data: bytes, run_key: str | None = None) -> tuple[str, str]:
    """Run id and run key of a descriptor that is signed by the key it names, and by `run_key` if one is known."""
    envelope = Envelope.from_bytes(data)
    if envelope.kind in (HEAD_KIND, MANIFEST_KIND):
        raise SignatureError(f"Expected a signed run descriptor, got a signed {envelope.kind}.")
    payload = envelope.open(envelope.kind, run_key or envelope.key)
    try:
        fields = json.loads(payload)
        run_id, named_key = str(fields["run_id"]), str(fields["run_key"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise IntegrityError("The run descriptor does not name run_id and run_key.") from None
    if named_key != envelope.key:
        raise SignatureError("The run descriptor names another key than the one that signed it.")
    return run_id, named_key


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
    text += b" " * (-len(text) % 8)
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
