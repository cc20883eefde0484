"""What happens to every request before and after its route: the server's time in each answer, bounds on rates and bodies."""

from collections.abc import Callable

from fastapi import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.coordinator.http.limits import RateLimit
from shoal.protocol.signing import TIME_HEADER

UPLOADS = "/v1/submissions/"
MAX_JSON_BYTES = 4 << 20


class ServerTime:
    """Adds the server's time to every answer, so that clients need no clock of their own."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float]) -> None:
        self._app, self._clock = app, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((TIME_HEADER.encode(), f"{self._clock():.3f}".encode()))
            await send(message)

        await self._app(scope, receive, timed)


class AddressLimit:
    """Refuses an address that asks too often before anything of its request is read."""

    def __init__(self, app: ASGIApp, limit: RateLimit, refuse: Callable[[float], Response]) -> None:
        self._app, self._limit, self._refuse = app, limit, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client") if scope["type"] == "http" else None
        wait_s = self._limit.wait_s(client[0]) if client else 0.0
        app = self._refuse(wait_s) if wait_s else self._app
        await app(scope, receive, send)


class BodyLimit:
    """Stops reading a body that is too large. The framework reads and parses it before any route or signature is looked at."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read_bytes = 0

        async def bounded() -> Message:
            nonlocal read_bytes
            message = await receive()
            read_bytes += len(message.get("body", b""))
            if read_bytes > MAX_JSON_BYTES:
                raise HTTPException(413, f"The body is larger than {MAX_JSON_BYTES} bytes.")
            return message

        await self._app(scope, receive if _is_upload(scope) else bounded, send)


def _is_upload(scope: Scope) -> bool:
    """Uploads go to disk and count their bytes themselves."""
    return scope["type"] == "http" and scope["method"] == "PUT" and bool(scope["path"].startswith(UPLOADS))
