"""Relays: how they announce themselves, how clients report them, how they are listed."""

from typing import Annotated

from pydantic import Field

from shoal.protocol.api.fields import Answer, Body, Count


class RelayBody(Body):
    url: Annotated[str, Field(pattern=r"^https?://[^\s]{1,200}$")]
    exchanges: bool = False
    """Whether it brings shards in from outside the list of relays and gives them to the others."""
    newest_version: Annotated[int, Field(ge=-1, le=1 << 53)] = -1
    bytes_sent: Count = 0
    bytes_received: Count = 0


class RelayView(Answer):
    key: str
    url: str
    exchanges: bool = False
    newest_version: int
    bytes_sent: int
    bytes_received: int
    last_seen_s: float
    success: float | None = None
    """Share of its answers that were right and complete, as its clients report; none before enough of them did."""
    reporters: int = 0
    """Clients that this share is the mean of."""


class RelaysAnswer(Answer):
    relays: list[RelayView]
    origin_url: str
    is_listed: bool = False
    """Whether the relay that announced itself has a place in the list."""


class RelayMeasurement(Body):
    """How one relay served since the last report."""

    url: Annotated[str, Field(max_length=220)]
    is_good: bool
    """Bytes came, they were the right ones, and more requests succeeded than failed."""
    served: Count = 0
    """Requests that were answered with the right bytes."""
    failed: Count = 0
    """Requests that were not answered, or with other bytes."""


class RelayReportBody(Body):
    relays: Annotated[list[RelayMeasurement], Field(max_length=32)]
