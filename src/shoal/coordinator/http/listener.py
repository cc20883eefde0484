"""One connection of the coordinator: counted, closed when it stays silent or takes nothing, and bounded before its signature.

A request's head has a deadline, at most `HEAD_BYTES` and `HEAD_FIELDS`; its body states its length, so that no framing
and no trailer hides bytes. What follows the head has the deadlines of its route. A peer that takes no byte of an answer for
`STALLED_S` is cut off.
"""

import asyncio
import json
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from shoal.coordinator.http.app import CoordinatorApp
from shoal.coordinator.http.refusals import SEE_DOCS
from shoal.coordinator.http.service import CONNECTION, Service
from shoal.net import address_block

HEAD_S = 20.0
"""From the connection, or from the first byte after an answer, to the end of a head. A silent connection costs next to nothing;
one that is closed comes back."""
HEAD_BYTES = 16 << 10
HEAD_FIELDS = 64
STALLED_S = 60.0
WAITING_CONNECTIONS = 4096
"""That the system keeps for us while we are busy; it lowers the number to its own limit."""


def server_config(app: CoordinatorApp, **options: Any) -> uvicorn.Config:
    """How the coordinator is served; who sent a request is found out by the application, not by uvicorn."""
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        log_level="error",
        access_log=False,
        proxy_headers=False,
        backlog=WAITING_CONNECTIONS,
        timeout_graceful_shutdown=2,
        **options,
    )


class OneWrite:
    """A transport that sends what is written at once together: the head of an answer and its body are two calls of uvicorn.

    What is written waits for the next write, or until the loop is free; so a stream's head leaves before its first event."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._waiting = b""

    def write(self, data: bytes) -> None:
        if self._waiting:
            self._transport.write(self._waiting + data)
            self._waiting = b""
        elif data:
            self._waiting = data
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._waiting = b""
        self._transport.abort()

    def _flush(self) -> None:
        if self._waiting:
            self._transport.write(self._waiting)
            self._waiting = b""

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)


class BoundedProtocol(HttpToolsProtocol):
    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(config.app, CoordinatorApp)
        self._service: Service = config.app.service
        self._head_deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._is_in_head = True
        self._head_bytes = self._head_fields = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self.transport = OneWrite(transport, self.loop)  # type: ignore[assignment]  # has everything of a transport
        peer = self.client[0] if self.client else ""
        address = None if peer in self._service.proxies else address_block(peer)
        closed = self._service.connections.enter(self, address)
        if closed is not None:
            closed.drop()
        if closed is not self:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._service.connections.leave(self)
        self._head_came()
        self.resume_writing()
        super().connection_lost(exc)

    @property
    def has_sent_all(self) -> bool:
        """Whether the body of the request that is being answered is here. A head that follows it says the same."""
        return self.cycle is not None and not self.cycle.more_body

    def drop(self) -> None:
        self.transport.abort()

    def hold(self) -> None:
        """Reads nothing more until the application asks for it."""
        self.flow.pause_reading()

    def vouch(self, key: str) -> None:
        """The connection belongs to a key that has accepted work; one of a proxy belongs to many."""
        closed = self._service.connections.vouch(self, key)
        if closed is not None:
            closed.drop()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._is_in_head and self._head_bytes > HEAD_BYTES:
            self._refuse(431, "too_large", f"The head of a request has at most {HEAD_BYTES} bytes.")
        elif self._is_in_head or self.cycle is None or self.cycle.response_complete:
            self._expect_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]  # ours
        self._is_in_head, self._head_fields = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_fields += 1
        if self._head_fields > HEAD_FIELDS:
            raise httptools.HttpParserError(f"more than {HEAD_FIELDS} header fields")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head, self._head_bytes = False, 0
        self._head_came()
        if any(name == b"transfer-encoding" for name, _ in self.headers):
            self._refuse(411, "length", "The length of a body must be stated.")
            raise httptools.HttpParserError("a body of unknown length")
        self._service.connections.touch(self)
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            self._refuse(400, "malformed", "This is no HTTP request that is served here.")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self._stalled or self.loop.call_later(STALLED_S, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _expect_head(self) -> None:
        if self._head_deadline is None:
            self._head_deadline = self.loop.call_later(HEAD_S, self.drop)

    def _head_came(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answers a request that no route will see, and closes on it."""
        body = json.dumps({"code": code, "message": message, "hint": SEE_DOCS}).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
