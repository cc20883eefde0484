"""Bounded HTTP GET over pooled connections: what comes back is never larger or later than the caller allowed.

Plain blocking sockets on threads, because `recv_into` a buffer of our own measured 1.5 times the bytes/s of an event-loop
client and releases the interpreter while it waits. One deadline covers connect, headers and body; it moves only with bytes that
arrive at the rate that the caller asks for, so a server that drips one byte per second ends like one that is silent. The bytes of
an answer are counted at the socket, so no framing makes it larger than allowed.
"""

import contextlib
import http.client
import io
import math
import socket
import ssl
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from shoal.broadcast.http.limits import TokenBucket
from shoal.errors import ConfigError, UnavailableError

CONNECT_TIMEOUT_S = 5.0
MAX_IDLE_PER_HOST = 16
READ_BYTES = 256 << 10
HEADER_BYTES = 64 << 10
# Framing of chunks of 64 bytes or more.
FRAMING_SHARE = 8

Reason = Literal["unreachable", "timeout", "slow", "status", "size", "cut"]
"""`slow` is a time-out after bytes had begun to arrive."""


class FetchError(UnavailableError):
    """One request that failed; `reason` says how, `status` is the HTTP status if there was one."""

    code = "fetch"

    def __init__(self, message: str, reason: Reason, *, status: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = status


@dataclass(frozen=True)
class Pace:
    """When an answer must be complete: at the deadline, and a second later for every `min_bytes_s` bytes, up to the limit."""

    deadline: float
    min_bytes_s: float = math.inf
    limit: float = math.inf


class HttpPool:
    """Safe to use from several threads; each connection belongs to one request at a time."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, max_bytes_s: float = 0) -> None:
        self.clock = clock
        self._bucket = TokenBucket(max_bytes_s, clock=clock)
        self._limited = max_bytes_s > 0
        self._idle: defaultdict[str, deque[http.client.HTTPConnection]] = defaultdict(deque)
        self._open: set[_DeadlineSocket] = set()
        self._closed = False
        self._lock = threading.Lock()

    def fetch(self, base_url: str, path: str, *, max_bytes: int, pace: Pace) -> bytes:
        """The body of a 200 answer of at most `max_bytes`."""
        buffer = bytearray()

        def consume(response: http.client.HTTPResponse) -> None:
            if (response.length or 0) > max_bytes:
                raise FetchError(
                    f"{base_url} offers {response.length} bytes for {path}, at most {max_bytes} are allowed.", "size"
                )
            while piece := response.read(min(1 << 20, max_bytes + 1 - len(buffer))):
                buffer.extend(piece)
                if len(buffer) > max_bytes:
                    raise FetchError(f"{base_url} sends more than {max_bytes} bytes for {path}.", "size")

        self._get(base_url, path, consume, Allowance(pace, max_bytes))
        return bytes(buffer)

    def fetch_into(self, base_url: str, path: str, buffer: memoryview, *, pace: Pace) -> None:
        """Fill the buffer exactly."""

        def consume(response: http.client.HTTPResponse) -> None:
            if response.length is not None and response.length != len(buffer):
                raise FetchError(
                    f"{base_url} offers {response.length} bytes for {path} instead of {len(buffer)}.", "size"
                )
            filled = 0
            while filled < len(buffer) and (count := response.readinto(buffer[filled:])):
                filled += count
            if filled < len(buffer):
                raise FetchError(f"{base_url} stopped after {filled} of {len(buffer)} bytes of {path}.", "cut")
            if response.read(1):
                raise FetchError(f"{base_url} sends more than {len(buffer)} bytes for {path}.", "size")

        self._get(base_url, path, consume, Allowance(pace, len(buffer)))

    def close(self) -> None:
        """Close idle connections and break those under way, so that reads from them fail at once."""
        with self._lock:
            self._closed = True
            sockets = list(self._open)
            self._idle.clear()
        for sock in sockets:
            sock.abort()

    def _get(
        self, base_url: str, path: str, consume: Callable[[http.client.HTTPResponse], None], allowed: "Allowance"
    ) -> None:
        connection, reused = self._take(base_url)
        try:
            try:
                response = self._request(connection, base_url, path, allowed)
            except ConnectionError:
                if not reused or self._closed:
                    raise
                # The server closed an idle connection at the moment we used it, which is no failure.
                connection.close()
                connection = _connection(base_url)
                response = self._request(connection, base_url, path, allowed)
            with response:  # a connection that the server will close hangs on its answer alone
                if response.status != 200:
                    message = f"{base_url} answers {response.status} for {path}."
                    raise FetchError(message, "status", status=response.status)
                consume(response)
        except BaseException as error:
            connection.close()
            raise _explain(error, base_url, path, allowed, self.clock()) from error
        self._give_back(base_url, connection)

    def _request(
        self, connection: http.client.HTTPConnection, base_url: str, path: str, allowed: "Allowance"
    ) -> http.client.HTTPResponse:
        if connection.sock is None:
            connection.timeout = max(0.001, min(CONNECT_TIMEOUT_S, allowed.until - self.clock()))
            connection.connect()
            plain: Any = connection.sock
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sock = _DeadlineSocket(plain, self.clock, self._open.discard, self._slow_down)
            self._open.add(connection.sock)
        sock: Any = connection.sock
        sock.allowed = allowed
        if self._closed:
            raise ConnectionAbortedError("this side is stopping")
        connection.request("GET", urlsplit(base_url).path.rstrip("/") + path)
        return connection.getresponse()

    def _slow_down(self, size_bytes: int) -> None:
        """Keep all connections together below the limit by reading later; TCP then slows the sender."""
        if self._limited:
            with self._lock:
                delay_s = self._bucket.delay(size_bytes)
            if delay_s > 0:
                time.sleep(delay_s)

    def _take(self, base_url: str) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            idle = self._idle[base_url]
            if idle:
                return idle.pop(), True
        return _connection(base_url), False

    def _give_back(self, base_url: str, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            idle = self._idle[base_url]
            if connection.sock is not None and len(idle) < MAX_IDLE_PER_HOST:
                idle.append(connection)
                return
        connection.close()


@dataclass
class Allowance:
    """What one answer may take in time and bytes, and how much of it has arrived."""

    pace: Pace
    max_bytes: int
    received: int = 0

    @property
    def until(self) -> float:
        return min(self.pace.deadline + self.received / self.pace.min_bytes_s, self.pace.limit)

    @property
    def left_bytes(self) -> int:
        """At the socket: headers and the framing of the body included."""
        return self.max_bytes + self.max_bytes // FRAMING_SHARE + HEADER_BYTES - self.received


class _DeadlineSocket:
    """The part of a socket that http.client uses, with one allowance over all its reads and writes."""

    def __init__(
        self,
        sock: socket.socket,
        clock: Callable[[], float],
        on_close: Callable[["_DeadlineSocket"], None],
        on_read: Callable[[int], None],
    ) -> None:
        self.allowed = Allowance(Pace(0.0), 0)
        self._on_close = on_close
        self.on_read = on_read
        self._sock = sock
        self._clock = clock
        self._readers = 0
        self._closing = False

    def arm(self) -> socket.socket:
        remaining = self.allowed.until - self._clock()
        if remaining <= 0:
            raise TimeoutError("deadline passed")
        self._sock.settimeout(remaining)
        return self._sock

    def sendall(self, data: bytes) -> None:
        self.arm().sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        self._readers += 1
        return io.BufferedReader(_DeadlineReader(self), 1 << 16)

    def reader_closed(self) -> None:
        self._readers -= 1
        self._close_when_unused()

    def close(self) -> None:
        self._closing = True
        self._close_when_unused()

    def abort(self) -> None:
        """End a read that another thread is blocked in."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self.close()

    def _close_when_unused(self) -> None:
        # http.client closes the socket of a "Connection: close" answer before it reads the body.
        if self._closing and self._readers <= 0:
            self._sock.close()
            self._on_close(self)


class _DeadlineReader(io.RawIOBase):
    def __init__(self, sock: _DeadlineSocket) -> None:
        self._socket = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        allowed = self._socket.allowed
        if allowed.left_bytes <= 0:
            raise FetchError(f"An answer has more than the {allowed.max_bytes} bytes that are allowed.", "size")
        count = self._socket.arm().recv_into(buffer, min(len(buffer), READ_BYTES, allowed.left_bytes))
        allowed.received += count
        self._socket.on_read(count)
        return count

    def close(self) -> None:
        if not self.closed:
            self._socket.reader_closed()
        super().close()


def check_url(url: str) -> str:
    """The address without a trailing slash, if it is one that can be fetched from."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is not the address of a relay.", hint="It looks like http://HOST:PORT.")
    return url.rstrip("/")


def _connection(base_url: str) -> http.client.HTTPConnection:
    parts = urlsplit(check_url(base_url))
    assert parts.hostname is not None
    if parts.scheme == "https":
        return http.client.HTTPSConnection(parts.hostname, parts.port, context=ssl.create_default_context())
    return http.client.HTTPConnection(parts.hostname, parts.port)


def _explain(error: BaseException, base_url: str, path: str, allowed: Allowance, now: float) -> BaseException:
    if isinstance(error, TimeoutError) or (isinstance(error, OSError) and now >= allowed.until):
        if allowed.received:
            return FetchError(f"{base_url} sent only {allowed.received} bytes of {path} in time.", "slow")
        return FetchError(f"{base_url} did not deliver {path} in time.", "timeout")
    if isinstance(error, http.client.IncompleteRead):
        return FetchError(f"{base_url} broke off in the middle of {path}.", "cut")
    if isinstance(error, (OSError, http.client.HTTPException)):
        return FetchError(f"{base_url} cannot be reached for {path}: {error or type(error).__name__}.", "unreachable")
    if isinstance(error, (ValueError, OverflowError)):  # http.client on framing such as a negative chunk
        return FetchError(f"{base_url} sends no HTTP for {path}: {error}.", "unreachable")
    return error
