"""What a route is: method, path, who may call it, what it reads, what it answers, and its limits.

Dispatch, authentication, limits and the API page are all made from these. A handler is a plain function of the service, the typed
input and the caller; it never sees HTTP. It returns a model, a response of its own (files, streams), or None for 204.
"""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel
from starlette.responses import Response

from shoal.coordinator.http.auth import Access, RequestHead, Signed
from shoal.coordinator.http.body import BodyLimit, BodyReader
from shoal.coordinator.http.service import Service
from shoal.errors import SignatureError
from shoal.files import digest_bytes
from shoal.protocol.client import SUBMISSION_SIGNATURE_HEADER

CallerT = TypeVar("CallerT")
InputT = TypeVar("InputT")
InputT_co = TypeVar("InputT_co", covariant=True)
ModelT = TypeVar("ModelT", bound=BaseModel)
AnswerT = TypeVar("AnswerT", bound=BaseModel | Response | None)

JSON = "application/json"
PARQUET = "application/vnd.apache.parquet"
SMALL = BodyLimit(max_bytes=16 << 10, deadline_s=10.0)
"""Bodies of workers and relays: keys are free, so what a key may hold in memory is small."""
LARGE = BodyLimit(max_bytes=4 << 20, deadline_s=60.0)
"""Bodies of the owner's roles."""


@dataclass(frozen=True)
class Incoming:
    """A request that was admitted; its body is still to be read."""

    head: RequestHead
    caller: Signed | None
    named: dict[str, str]
    """Values of the path's parameters."""
    body: BodyReader


class Reads(Protocol[InputT_co]):
    """How a request becomes the typed input of a handler."""

    async def read(self, incoming: Incoming) -> InputT_co: ...


class Nothing:
    async def read(self, incoming: Incoming) -> None:
        return None


@dataclass(frozen=True)
class Json(Generic[ModelT]):
    """A JSON body. It is parsed only if it is what the caller signed."""

    model: type[ModelT]
    limit: BodyLimit = SMALL

    async def read(self, incoming: Incoming) -> ModelT:
        body = await incoming.body.whole(self.limit)
        if incoming.caller is None or digest_bytes(body) != incoming.caller.body_digest:
            raise SignatureError("The body is not the one that was signed.")
        return self.model.model_validate_json(body)


@dataclass(frozen=True)
class PlainJson(Generic[ModelT]):
    """A JSON body of somebody who signs nothing."""

    model: type[ModelT]
    limit: BodyLimit = SMALL

    async def read(self, incoming: Incoming) -> ModelT:
        return self.model.model_validate_json(await incoming.body.whole(self.limit))


@dataclass(frozen=True)
class Address(Generic[ModelT]):
    """Parameters of the path and the query."""

    model: type[ModelT]

    async def read(self, incoming: Incoming) -> ModelT:
        query = dict(parse_qsl(incoming.head.query, keep_blank_values=True))
        return self.model.model_validate(query | incoming.named)


@dataclass(frozen=True)
class Upload:
    """The file of a lease, whose bytes are still to be read."""

    lease_id: str
    digest: str
    """Of the file, as signed by the request."""
    signature: str
    """The worker's evidence: run, lease and digest."""
    body: BodyReader


class UploadStream:
    async def read(self, incoming: Incoming) -> Upload:
        assert incoming.caller is not None, "uploads are signed"
        return Upload(
            incoming.named["lease_id"],
            incoming.caller.body_digest,
            incoming.head.headers.get(SUBMISSION_SIGNATURE_HEADER, ""),
            incoming.body,
        )


@dataclass(frozen=True)
class Route(Generic[InputT, CallerT, AnswerT]):
    method: str
    path: str
    handler: Callable[[Service, InputT, CallerT], Awaitable[AnswerT]]
    access: Access[CallerT]
    reads: Reads[InputT]
    answer: type[AnswerT]
    media: str = JSON
    cost: int = 1
    """Requests that it counts as, against the rates of key and address."""
    is_listed: bool = True
    """Whether the API page shows it."""
    waits: bool = False
    """Whether it may wait for a change: it ends when its caller leaves, or it would take work for nobody."""
    pattern: "re.Pattern[str]" = field(init=False)

    def __post_init__(self) -> None:
        pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/\\x00-\\x1f\\x7f]+)", re.escape(self.path))
        object.__setattr__(self, "pattern", re.compile(pattern))


AnyRoute = Route[Any, Any, Any]
"""In a table, where each row has types of its own."""
