"""How connections are taken in: a few per turn of the event loop, so that requests on open ones are answered in between.

The loops themselves accept until nobody waits, so a flood of connections that are closed and come back keeps one turn going for
seconds.
"""

import asyncio
import errno
import functools
import logging
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 4
"""Each costs a fraction of a millisecond."""
RETRY_S = 1.0
"""After the system had no file or memory left for a connection."""
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Takes connections of one listening socket until it is closed. Belongs to the running loop."""

    def __init__(self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        self._listener, self._make_protocol = listener, make_protocol
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        listener.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self.accept)

    def accept(self) -> int:
        """One turn; returns how many were taken in."""
        for taken in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return taken
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
                log.warning("no connection can be taken in: %s", error.strerror)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(RETRY_S, self._listen)
                return taken
            self._begin(connection)
        return ACCEPTED_AT_ONCE

    def _begin(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        task = self._loop.create_task(self._connect(connection))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:  # gone before it began
            connection.close()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._beginning, return_exceptions=True)


class BoundedServer(uvicorn.Server):
    """Serves listening sockets by acceptors of ours."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        protocol: Any = self.config.http_protocol_class
        facts = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        make_protocol = functools.partial(protocol, **facts)
        for listener in sockets or []:
            self.servers.append(Acceptor(listener, make_protocol))  # type: ignore[arg-type]  # has what uvicorn uses
