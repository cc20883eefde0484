"""Reading the body of a request: bounded in size and time, once, and never before its sender is admitted."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from shoal.coordinator.http.refusals import timed_out, too_large
from shoal.errors import RefusedError

T = TypeVar("T")

SLOW_S, SLOW_BYTES_S = 0.5, 64 << 10
"""A refused sender that has sent less than this after so long is slow."""


@dataclass(frozen=True)
class BodyLimit:
    max_bytes: int
    deadline_s: float
    """For the whole body, from the first byte that is asked for."""


class Sender(Protocol):
    """The connection that a body comes by."""

    @property
    def has_sent_all(self) -> bool: ...


class BodyReader:
    def __init__(self, receive: Receive, sender: Sender | None = None) -> None:
        self._receive, self._sender = receive, sender
        self.has_more = True

    async def whole(self, limit: BodyLimit) -> bytes:
        """The body, in memory."""
        if (
            self._sender is not None and self._sender.has_sent_all
        ):  # as nearly always: a deadline costs more than the rest
            return await self._join(limit)
        try:
            async with asyncio.timeout(limit.deadline_s):
                return await self._join(limit)
        except TimeoutError:
            raise timed_out() from None

    async def _join(self, limit: BodyLimit) -> bytes:
        parts, size_bytes = list[bytes](), 0
        while self.has_more:
            parts.append(await self._next())
            size_bytes += len(parts[-1])
            _check_size(size_bytes, limit)
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

    async def discard(self, limit: BodyLimit, hold: Callable[[], None] | None = None) -> None:
        """Reads the rest without keeping it. With `hold`, a slow sender is no longer read from, but not closed either until the
        deadline: it costs nothing meanwhile, and would come back at once."""
        clock = asyncio.get_running_loop().time
        size_bytes, started = 0, clock()
        try:
            async for chunk in self.chunks(limit):
                size_bytes += len(chunk)
                waited_s = clock() - started
                if hold is not None and self.has_more and waited_s >= SLOW_S and size_bytes < waited_s * SLOW_BYTES_S:
                    hold()
                    await asyncio.sleep(limit.deadline_s - waited_s)
                    return
        except (ClientDisconnect, RefusedError):
            return

    async def unless_gone(self, answer: Awaitable[T]) -> T:
        """The answer; ClientDisconnect, and no more work for it, when the sender leaves first. For after the body."""
        answering, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            raise ClientDisconnect
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.wait((answering, leaving))

    async def _gone(self) -> None:
        with contextlib.suppress(ClientDisconnect):
            while True:
                await self._next()

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
