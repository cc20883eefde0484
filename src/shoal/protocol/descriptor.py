"""The run descriptor: what every role must know to join, signed by the run key, fetched once.

Worker and validator build everything from it; nothing is assumed. A protocol version that this release does not speak is
refused with an upgrade hint.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.config import LoraConfig, RewardConfig, RolloutConfig, TasksConfig
from shoal.errors import IntegrityError, ShoalError, SignatureError
from shoal.files import Digest
from shoal.identity import DESCRIPTOR_KIND, MAX_DESCRIPTOR_BYTES, Envelope, Keypair
from shoal.protocol.environments import EnvironmentReference
from shoal.protocol.signing import PROTOCOL_VERSION

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
"""New workers write files of these names, so they can name no directory."""


class ProtocolVersionError(ShoalError):
    """The run speaks another version of the protocol."""

    code = "protocol_version"
    permanent = True


class FileReference(BaseModel):
    model_config = ConfigDict(frozen=True)
    digest: Digest
    bytes: Annotated[int, Field(ge=0)]


class AdapterTerms(BaseModel):
    """Versions are adapters of frozen weights, which everybody fetches once."""

    model_config = ConfigDict(frozen=True)
    lora: LoraConfig
    base_manifest: Digest
    """Of the published base."""
    base_weights: Digest
    """Names, types, shapes and contents of its tensors."""
    base_bytes: Annotated[int, Field(ge=0)]


class RunDescriptor(BaseModel):
    model_config = ConfigDict(frozen=True)
    run_id: str
    protocol: int
    run_key: str
    coordinator_key: str
    coordinator_url: str
    relay_urls: tuple[str, ...]
    model_files: dict[FileName, FileReference]
    """Config and tokenizer files of the base model, served like shards."""
    adapter: AdapterTerms | None = None
    """None where versions are whole policies."""
    tasks: TasksConfig
    task_set_digest: str
    task_count: int
    task_files: tuple[FileReference, ...] = ()
    """The training tasks, packed and cut into pieces that are served like shards; none where the source is public."""
    heldout_files: tuple[FileReference, ...] = ()
    """The held-out tasks, likewise."""
    environments: tuple[EnvironmentReference, ...] = ()
    """Those that the run's episodes meet."""
    rollouts: RolloutConfig
    reward: RewardConfig
    scoring_s: Annotated[float, Field(gt=0)] = 10.0
    """Processor seconds that a worker may spend on scoring the answers of one submission; a validator may spend three times
    as much."""
    async_level: int
    chunk_tokens: int
    top_k: int
    numerics_classes: tuple[str, ...]
    secret_commitment: str

    def seal(self, run_key: Keypair) -> Envelope:
        return Envelope.seal(DESCRIPTOR_KIND, self.model_dump_json(), run_key)


def open_descriptor(data: bytes, run_key: str | None = None) -> RunDescriptor:
    """The descriptor in these bytes; with no key given, the key it names itself, for the caller to pin."""
    if len(data) > MAX_DESCRIPTOR_BYTES:
        raise IntegrityError("The run descriptor is larger than 1 MiB.")
    envelope = Envelope.from_bytes(data)
    payload = envelope.open(DESCRIPTOR_KIND, run_key or envelope.key)
    try:
        _check_protocol(_Protocol.model_validate_json(payload).protocol)
        descriptor = RunDescriptor.model_validate_json(payload)
    except ValidationError as error:
        raise IntegrityError(f"The run descriptor is malformed: {error.errors()[0]['msg']}.") from None
    if descriptor.run_key != envelope.key:
        raise SignatureError("The run descriptor is not signed by the run key that it names.")
    return descriptor


class _Protocol(BaseModel):
    """The one field that every protocol version shares."""

    protocol: int


def _check_protocol(protocol: int) -> None:
    if protocol != PROTOCOL_VERSION:
        raise ProtocolVersionError(
            f"The run speaks protocol {protocol}, this release speaks {PROTOCOL_VERSION}.",
            hint="Install the release of Shoal that the run's owner names.",
        )
