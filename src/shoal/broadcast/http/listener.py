"""An aiohttp application on an event loop of its own thread, behind a limit on connections.

A newcomer is let in and the longest idle connection of its address, or of the address that holds most, is closed.

`start` returns when it listens or raises one clear sentence; `stop` returns when the port is free again.
"""

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable

from aiohttp import web

from shoal.broadcast.http.limits import ServerLimits
from shoal.errors import ShoalError, UnavailableError
from shoal.net import WILDCARDS, Connections, address_block, http_url, raise_file_limit

START_TIMEOUT_S = 30.0
IN_USE = "Choose another port, or stop the process that uses it."
NO_ADDRESS = "Name an address of this machine, an IPv6 address without brackets, and a port that this user may use."


class ConnectionLimit(asyncio.Protocol):
    """One connection: closed when its address or the server holds too many, or when it never asks for anything."""

    def __init__(
        self, inner: asyncio.Protocol, connections: "Connections[ConnectionLimit]", limits: ServerLimits
    ) -> None:
        self._inner = inner
        self._connections = connections
        self._limits = limits
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        peer = transport.get_extra_info("peername")
        self._transport = transport
        self._inner.connection_made(transport)
        self._timer = asyncio.get_running_loop().call_later(self._limits.first_request_within_s, self.drop)
        closed = self._connections.enter(self, address_block(str(peer[0]) if peer else ""))
        if closed is not None:
            closed.drop()

    def asked(self) -> None:
        """A whole request has come."""
        self._connections.touch(self)
        self._stop_timer()

    def drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        self._connections.leave(self)
        self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


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
        return http_url(WILDCARDS.get(self._host, self._host), self.port)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(timeout=START_TIMEOUT_S)
        except OSError as error:
            self.stop()
            reason = error.strerror or str(error)
            message = f"The {self._name} cannot listen on {self._host}:{self.port}: {reason}."
            raise UnavailableError(message, hint=IN_USE if error.errno == errno.EADDRINUSE else NO_ADDRESS) from None
        except ShoalError:  # of the application, such as a head that cannot be read
            self.stop()
            raise

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
        total = min(self._limits.connections_total, raise_file_limit() // 2)
        connections = Connections[ConnectionLimit](self._limits.connections_per_client, total)
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
