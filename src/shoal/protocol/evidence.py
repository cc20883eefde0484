"""What the coordinator signs for others to keep: heads of its ledger, and receipts for uploads.

A kept head shows that the ledger had this beginning at that time; a receipt shows that a file arrived. Both are one line of text, a
signed envelope, and name their run.
"""

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.errors import IntegrityError
from shoal.files import Digest
from shoal.identity import Envelope, Keypair
from shoal.protocol.steps import StepId

EvidenceKind = Literal["ledger-head", "receipt"]
Count = Annotated[int, Field(ge=0, le=1 << 53)]
HEADS_FILE = "ledger-heads.jsonl"
RECEIPTS_FILE = "receipts.jsonl"
"""In the directory of the worker or relay that keeps them."""
MAX_EVIDENCE_BYTES = 4096


class Evidence(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    run_id: Annotated[str, Field(max_length=128)]
    at: float
    entries: Count
    """Of the ledger at this time."""
    head: Digest
    """Hash of its last entry."""


class LedgerHead(Evidence):
    """The ledger had these entries at this time."""


class Receipt(Evidence):
    """A file arrived for a lease; a verdict or another entry about it must follow."""

    worker: Digest
    lease: Annotated[str, Field(max_length=64)]
    epoch: Count
    step: Count
    attempt: Count
    slot: Count
    file: Digest

    @property
    def step_id(self) -> StepId:
        return StepId(self.epoch, self.step, self.attempt)


Kind = TypeVar("Kind", bound=Evidence)
KINDS: dict[type[Evidence], EvidenceKind] = {LedgerHead: "ledger-head", Receipt: "receipt"}


def seal(evidence: Evidence, coordinator: Keypair) -> str:
    return Envelope.seal(KINDS[type(evidence)], evidence.model_dump_json(), coordinator).to_bytes().decode()


def open_evidence(kind: type[Kind], text: str, coordinator_key: str) -> Kind:
    """What the text vouches for, if the coordinator signed it."""
    payload = Envelope.from_bytes(text.encode()).open(KINDS[kind], coordinator_key)
    try:
        return kind.model_validate_json(payload)
    except ValidationError as error:
        raise IntegrityError(f"A signed {KINDS[kind]} is malformed: {error.errors()[0]['msg']}.") from None
