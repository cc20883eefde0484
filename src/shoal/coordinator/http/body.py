"""Reading the body of a request: bounded in size and time, once, and never before its sender is admitted."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from shoal.coordinator.http.refusals import timed_out, too_large
from shoal.errors import RefusedError


@dataclass(frozen=True)
class BodyLimit:
    max_bytes: int
    deadline_s: float
    """For the whole body, from the first byte that is asked for."""


class BodyReader:
    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.has_more = True

    async def whole(self, limit: BodyLimit) -> bytes:
        """The body, in memory."""
        parts = [chunk async for chunk in self.chunks(limit)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def chunks(self, limit: BodyLimit) -> AsyncIterator[bytes]:
        size_bytes, until = 0, asyncio.get_running_loop().time() + limit.deadline_s
        while self.has_more:
            chunk = await self._next(until)
            size_bytes += len(chunk)
            if size_bytes > limit.max_bytes:
                raise too_large(limit.max_bytes)
            yield chunk

    async def discard(self, limit: BodyLimit) -> None:
        """Reads the rest without keeping it."""
        try:
            async for _ in self.chunks(limit):
                pass
        except (ClientDisconnect, RefusedError):
            return

    async def _next(self, until: float) -> bytes:
        try:
            async with asyncio.timeout_at(until):
                message = await self._receive()
        except TimeoutError:
            raise timed_out() from None
        if message["type"] == "http.disconnect":
            self.has_more = False
            raise ClientDisconnect
        self.has_more = message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        return chunk
