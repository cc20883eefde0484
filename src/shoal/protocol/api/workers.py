"""How a worker registers, what it says while it works, and what everybody sees of it."""

from typing import Annotated, Literal

from pydantic import Field

from shoal.protocol.api.fields import Answer, Body, Count, ShortText, WorkerState


class RegisterBody(Body):
    name: ShortText
    numerics_class: ShortText
    tokens_per_s: Annotated[float, Field(gt=0, lt=1e9)]
    memory_bytes: Count = 0
    """Of the whole machine; 0 if unknown."""
    link_bytes_per_s: Annotated[float, Field(ge=0, lt=1e12)] = 0.0
    """Measured while the first weights came in; 0 if they were already there."""


class WorkerView(Answer):
    key: str
    name: str
    state: WorkerState
    reason: str = ""
    credit_held: int = 0
    credit_released: int = 0
    submissions_accepted: int = 0
    submissions_rejected: int = 0
    last_seen_s: float = 0.0
    activity: str = ""
    tokens_per_s: float = 0.0
    memory_bytes: int = 0
    link_bytes_per_s: float = 0.0
    banned_at_s: float | None = None
    """Seconds since the run began."""


class HeartbeatBody(Body):
    activity: ShortText
    tokens_generated: Count = 0
    bytes_received: Count = 0
    ledger_head: Annotated[str, Field(max_length=2048)] = ""
    """The newest signed head of the ledger that the worker has kept."""


class HeartbeatAnswer(Answer):
    worker: WorkerView
    relay_urls: list[str]
    interval_s: float = 5.0
    """When the next heartbeat is expected."""
    ledger_head: str = ""
    """The head of the ledger, signed, for the worker to keep."""
    epoch: int = 0
    """Leases of earlier epochs are void."""
    kept_head: Literal["known", "restored", "unknown"] = "known"
    """Whether the ledger has the head that the worker reported, lost it by a restore, or does not know it."""
