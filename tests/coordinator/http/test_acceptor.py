"""A flood of connections never keeps the loop from those that are open."""

import asyncio
import errno
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from shoal.coordinator.http import acceptor
from shoal.coordinator.http.acceptor import ACCEPTED_AT_ONCE, Acceptor

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
FLOOD = 5 * ACCEPTED_AT_ONCE


class Echo(asyncio.Protocol):
    made = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport  # uvloop's are no subclass of asyncio's
        Echo.made += 1

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    Echo.made = 0
    with socket.create_server(("127.0.0.1", 0), backlog=2 * FLOOD) as listener:
        yield listener


def flood(listener: socket.socket) -> list[socket.socket]:
    return [socket.create_connection(listener.getsockname()) for _ in range(FLOOD)]


def run_in(make_loop: Callable[[], asyncio.AbstractEventLoop], test: Callable[[], object]) -> None:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(test())  # type: ignore[arg-type]  # a coroutine


@pytest.mark.parametrize("loop", LOOPS)
def test_one_turn_takes_in_a_few_and_the_next_ones_the_rest(listening: socket.socket, loop: str) -> None:
    waiting = flood(listening)

    async def test() -> None:
        taking = Acceptor(listening, Echo)
        taking.close()
        turns = [taking.accept() for _ in range(FLOOD // ACCEPTED_AT_ONCE + 1)]
        assert turns == [ACCEPTED_AT_ONCE] * (FLOOD // ACCEPTED_AT_ONCE) + [0]
        await taking.wait_closed()
        assert Echo.made == FLOOD

    run_in(LOOPS[loop], test)
    for connection in waiting:
        connection.close()


@pytest.mark.parametrize("loop", LOOPS)
def test_an_open_connection_is_answered_before_a_flood_is_taken_in(listening: socket.socket, loop: str) -> None:
    async def test() -> None:
        taking = Acceptor(listening, Echo)
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(b"a")
        assert await reader.read(1) == b"a"
        waiting = flood(listening)  # the loop stands still meanwhile, so all of them wait
        writer.write(b"b")
        assert await reader.read(1) == b"b"
        assert Echo.made < FLOOD
        while Echo.made < FLOOD + 1:
            await asyncio.sleep(0)
        taking.close()
        writer.close()
        for connection in waiting:
            connection.close()

    run_in(LOOPS[loop], test)


class Exhausted:
    """A listening socket of a process without free files."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self.is_exhausted = listener, True

    def accept(self) -> tuple[socket.socket, object]:
        if self.is_exhausted:
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def setblocking(self, flag: bool) -> None:
        self._listener.setblocking(flag)

    def fileno(self) -> int:
        return self._listener.fileno()


def test_a_process_without_files_waits_and_takes_connections_in_again(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "RETRY_S", 0.001)

    async def test() -> None:
        exhausted = Exhausted(listening)
        taking = Acceptor(exhausted, Echo)  # type: ignore[arg-type]
        with socket.create_connection(listening.getsockname()):
            assert taking.accept() == 0
            exhausted.is_exhausted = False
            while not Echo.made:
                await asyncio.sleep(0)
        taking.close()

    run_in(asyncio.new_event_loop, test)
