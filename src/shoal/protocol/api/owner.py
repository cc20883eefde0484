"""What the owner asks of a run: its state, a ban, a rewind."""

from typing import Annotated

from pydantic import Field

from shoal.files import Digest
from shoal.protocol.api.fields import Answer, Body, Count, OwnerState, PublicKey, RunState, ShortText


class RunStateBody(Body):
    state: OwnerState


class RunStateAnswer(Answer):
    run_state: RunState
    step: int
    newest_version: int
    leases_outstanding: int
    submissions_pending: int


class BanBody(Body):
    worker: PublicKey
    reason: Annotated[ShortText, Field(min_length=1)]
    """Recorded in the ledger, for everybody to read."""


class RewindBody(Body):
    """What the owner asks for: everything after a version becomes void."""

    epoch: Annotated[int, Field(gt=0, le=1 << 53)]
    """The one that begins; a repeated request has the same."""
    version: Count
    manifest_digest: Digest
    """Of that version."""
    reason: Annotated[ShortText, Field(min_length=1)]
    """Recorded in the ledger, for everybody to read."""
    audit: bool = False
    """Whether everything that the voided steps were trained on is audited in full."""
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
    """By the run key; the ledger keeps it."""


class RewindView(Answer):
    epoch: int
    version: int
    """That the run returned to."""
    newest_before: int
    """Versions up to this one became void."""
    groups: int
    """That were withdrawn; their credit stays."""
    audits: int
    """Files that were sent to a full audit."""
    at: float
    reason: str

    @property
    def lost_steps(self) -> int:
        return self.newest_before - self.version
