"""An aiohttp application on an event loop of its own thread, behind a limit on connections.

`start` returns when it listens or raises one clear sentence; `stop` returns when the port is free again.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable

from aiohttp import web

from shoal.broadcast.http.limits import ClientCount, ServerLimits
from shoal.errors import UnavailableError

START_TIMEOUT_S = 30.0


class ConnectionLimit(asyncio.Protocol):
    """One connection: refused when there are too many, closed when it never asks for anything."""

    def __init__(self, inner: asyncio.Protocol, connections: ClientCount, limits: ServerLimits) -> None:
        self.asked = False
        self._inner = inner
        self._connections = connections
        self._limits = limits
        self._client: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        peer = transport.get_extra_info("peername")
        client = str(peer[0]) if peer else ""
        if not self._connections.enter(client):
            transport.abort()
            return
        self._client = client
        self._inner.connection_made(transport)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._limits.first_request_within_s, self._close_idle, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._client is not None:
            self._connections.leave(self._client)
            self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._client is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._client is not None else None

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def _close_idle(self, transport: asyncio.Transport) -> None:
        if not self.asked:
            transport.abort()


class ServerThread:
    def __init__(
        self,
        build: Callable[[], web.Application],
        host: str,
        port: int,
        *,
        name: str,
        limits: ServerLimits | None = None,
    ) -> None:
        self._build = build
        self._host = host
        self._name = name
        self._limits = limits or ServerLimits()
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self.port = port

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self._host in ("0.0.0.0", "") else self._host
        return f"http://{host}:{self.port}"

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(timeout=START_TIMEOUT_S)
        except OSError as error:
            self.stop()
            reason = error.strerror or str(error)
            message = f"The {self._name} cannot listen on {self._host}:{self.port}: {reason}."
            raise UnavailableError(message, hint="Choose another port, or stop the process that uses it.") from None

    def stop(self) -> None:
        if self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(timeout=START_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=START_TIMEOUT_S)
        self._loop.close()
        self._thread = None

    async def _listen(self) -> None:
        self._runner = web.AppRunner(
            self._build(), access_log=None, keepalive_timeout=60, shutdown_timeout=1, handler_cancellation=True
        )
        await self._runner.setup()
        connections = ClientCount(self._limits.connections_per_client, self._limits.connections_total)
        handlers = self._runner.server
        assert handlers is not None
        self._server = await self._loop.create_server(
            lambda: ConnectionLimit(handlers(), connections, self._limits), self._host, self.port, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
        with contextlib.suppress(RuntimeError):
            await self._loop.shutdown_default_executor()
