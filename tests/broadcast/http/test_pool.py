"""Answers of any framing stay within the bytes and the time that were allowed."""

import math
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from shoal.broadcast.http.pool import FetchError, HttpPool, Pace

from ..conftest import SlowClock

ALLOWED = 1 << 18
FLOOD = 16
BLOCK = b"x" * (1 << 20)
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

FRAMINGS = {
    "a negative chunk": (CHUNKED + b"-80000000\r\n", BLOCK),
    "a chunk of minus one": (CHUNKED + b"-1\r\n", BLOCK),
    "a good chunk, then a negative one": (CHUNKED + b"5\r\nhello\r\n-2\r\n", BLOCK),
    "a chunk below every integer": (CHUNKED + b"-" + b"f" * 40 + b"\r\n", BLOCK),
    "an enormous chunk": (CHUNKED + b"7fffffffffffffff\r\n", BLOCK),
    "chunks of one byte": (CHUNKED, b"1\r\nx\r\n" * (1 << 18)),
    "endless trailers": (CHUNKED + b"0\r\n", b"X-Trailer: x\r\n" * (1 << 16)),
    "a negative length": (HEAD + b"Content-Length: -1\r\n\r\n", BLOCK),
    "no length": (HEAD + b"Connection: close\r\n\r\n", BLOCK),
    "an enormous length": (HEAD + b"Content-Length: 99999999999999\r\n\r\n", BLOCK),
    "endless headers": (HEAD, b"X-Header: x\r\n" * (1 << 16)),
    "one endless header": (HEAD + b"X-Header: ", BLOCK),
    "endless interim answers": (b"", b"HTTP/1.1 100 Continue\r\nX: x\r\n\r\n" * (1 << 15)),
}


@contextmanager
def server(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that reads one request per connection and then says what `talk` says."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.recv(1 << 16)
                try:
                    talk(connection)
                except OSError:
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(10)


@contextmanager
def flooding(beginning: bytes, rest: bytes) -> Iterator[str]:
    def talk(connection: socket.socket) -> None:
        connection.sendall(beginning)
        for _ in range(FLOOD):
            connection.sendall(rest)

    with server(talk) as url:
        yield url


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(FetchError):
            work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("framing", FRAMINGS)
def test_no_framing_makes_an_answer_larger_than_allowed(framing: str) -> None:
    with flooding(*FRAMINGS[framing]) as url:
        pool = HttpPool()
        buffer = memoryview(bytearray(ALLOWED))
        pace = Pace(time.monotonic() + 60)
        assert peak_bytes(lambda: pool.fetch(url, "/file", max_bytes=ALLOWED, pace=pace)) < 4 * ALLOWED
        assert peak_bytes(lambda: pool.fetch_into(url, "/file", buffer, pace=pace)) < 2 * ALLOWED
        pool.close()


@pytest.mark.parametrize("chunk", [64, 1000, 1 << 20])
def test_honest_chunks_are_read(chunk: int) -> None:
    body = bytes(range(256)) * (ALLOWED // 256)
    framed = b"".join(
        b"%x\r\n%s\r\n" % (len(body[at : at + chunk]), body[at : at + chunk]) for at in range(0, len(body), chunk)
    )
    with server(lambda connection: connection.sendall(CHUNKED + framed + b"0\r\n\r\n")) as url:
        pool = HttpPool()
        buffer = memoryview(bytearray(ALLOWED))
        pool.fetch_into(url, "/file", buffer, pace=Pace(time.monotonic() + 60))
        assert buffer == body
        assert pool.fetch(url, "/file", max_bytes=ALLOWED, pace=Pace(time.monotonic() + 60)) == body
        pool.close()


def slow_server(clock: SlowClock, pieces: int, seconds: float) -> Callable[[socket.socket], None]:
    """1000 bytes in pieces, with time between them."""

    def talk(connection: socket.socket) -> None:
        clock.send(connection.sendall, HEAD + b"Content-Length: 1000\r\n\r\n", 0.0)
        for _ in range(pieces):
            clock.send(connection.sendall, b"x" * (1000 // pieces), seconds)

    return talk


def test_an_answer_that_goes_on_arriving_is_waited_for() -> None:
    clock = SlowClock()
    with server(slow_server(clock, pieces=10, seconds=9.0)) as url:
        pool = HttpPool(clock=clock)
        data = pool.fetch(url, "/file", max_bytes=1000, pace=Pace(clock.now + 10, min_bytes_s=10))
        assert len(data) == 1000
        clock.stop()
        pool.close()


@pytest.mark.parametrize(("min_bytes_s", "limit_s"), [(1000, math.inf), (10, 50.0)])
def test_an_answer_slower_than_allowed_is_cut_off(min_bytes_s: float, limit_s: float) -> None:
    clock = SlowClock()
    with server(slow_server(clock, pieces=10, seconds=9.0)) as url:
        pool = HttpPool(clock=clock)
        pace = Pace(clock.now + 10, min_bytes_s, clock.now + limit_s)
        with pytest.raises(FetchError) as caught:
            pool.fetch(url, "/file", max_bytes=1000, pace=pace)
        assert caught.value.reason == "slow"
        clock.stop()
        pool.close()
