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
        parts, size_bytes = list[bytes](), 0
        try:
            async with asyncio.timeout(limit.deadline_s):
                while self.has_more:
                    parts.append(await self._next())
                    size_bytes += len(parts[-1])
                    _check_size(size_bytes, limit)
        except TimeoutError:
            raise timed_out() from None
        return b"".join(parts)

    async def chunks(self, limit: BodyLimit) -> AsyncIterator[bytes]:
        """The body as it comes in."""
        size_bytes, until = 0, asyncio.get_running_loop().time() + limit.deadline_s
        while self.has_more:
            try:
                async with asyncio.timeout_at(until):
                    chunk = await self._next()
            except TimeoutError:
                raise timed_out() from None
            size_bytes += len(chunk)
            _check_size(size_bytes, limit)
            yield chunk

    async def discard(self, limit: BodyLimit) -> None:
        """Reads the rest without keeping it."""
        try:
            async for _ in self.chunks(limit):
                pass
        except (ClientDisconnect, RefusedError):
            return

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.has_more = False
            raise ClientDisconnect
        self.has_more = message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        return chunk


def _check_size(size_bytes: int, limit: BodyLimit) -> None:
    if size_bytes > limit.max_bytes:
        raise too_large(limit.max_bytes)
