"""Work that a worker is given, and the file that it sends for it."""

from typing import Annotated, Literal

from pydantic import Field

from shoal.files import Digest
from shoal.protocol.api.fields import Answer, Body, ClientId, Count, ShortText

MOST_LEASES = 8
"""Of one request."""


class LeaseAddress(Body):
    lease_id: str


class LeaseBody(Body):
    request_id: ClientId
    held_versions: Annotated[list[Count], Field(max_length=64)]
    most: Annotated[int, Field(ge=1, le=MOST_LEASES)] = 1
    """Slots that the worker has room for."""
    wait_s: Annotated[float, Field(ge=0, le=5)] = 0
    """How long the answer may wait for work."""


class Lease(Answer):
    lease_id: str
    epoch: int = 0
    step: int
    attempt: int = 0
    slot: int
    slot_seed: str
    policy_version: int
    manifest_digest: str
    expires_at: float
    by_bucket: bool = False
    """Whether the rollouts are to be uploaded by a URL that the coordinator gives out."""


class LeaseAnswer(Answer):
    lease: Lease | None = None
    beside: list[Lease] = []
    """More slots, if the worker has room for them."""
    reason: Literal[
        "granted", "no_work", "need_weights", "waiting_for_trainer", "paused", "draining", "disk_full", "finished"
    ] = "granted"
    retry_after_s: float = 0.5
    wanted_version: int = 0

    @property
    def granted(self) -> list[Lease]:
        return [] if self.lease is None else [self.lease, *self.beside]


class UploadBody(Body):
    """Announces the file of a lease, and later says that it is in the bucket."""

    lease_id: ShortText
    digest: Digest
    size_bytes: Annotated[int, Field(gt=0, le=1 << 40)]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


class UploadAnswer(Answer):
    url: str
    """Where these bytes, and no others, may be put; empty if the coordinator takes them itself."""


class SubmissionAnswer(Answer):
    submission_id: str
    state: str
    receipt: str = ""
    """Signed by the coordinator: this file arrived. Keep it until the ledger has a verdict on it."""


class SubmissionAddress(Body):
    submission_id: str
