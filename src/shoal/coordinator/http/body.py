"""Reading the body of a request: bounded, once, and never before its sender is admitted."""

from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from shoal.coordinator.http.refusals import too_large
from shoal.errors import RefusedError


class BodyReader:
    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._has_more = True

    async def whole(self, max_bytes: int) -> bytes:
        """The body, in memory."""
        parts = [chunk async for chunk in self.chunks(max_bytes)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def chunks(self, max_bytes: int) -> AsyncIterator[bytes]:
        size_bytes = 0
        while self._has_more:
            chunk = await self._next()
            size_bytes += len(chunk)
            if size_bytes > max_bytes:
                raise too_large(max_bytes)
            yield chunk

    async def discard(self, max_bytes: int) -> None:
        """Reads the rest without keeping it."""
        try:
            async for _ in self.chunks(max_bytes):
                pass
        except (ClientDisconnect, RefusedError):
            return

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._has_more = False
            raise ClientDisconnect
        self._has_more = message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        return chunk
