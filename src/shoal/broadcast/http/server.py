"""Serve a published directory: immutable files with ranges, and one pointer that can be waited for.

GET /head.json?newer_than=COUNTER&wait_s=S answers as soon as the head's counter passes COUNTER. GET /shards/DIGEST?wait_s=S
holds the request for a file that is on its way. Everything else is a plain static file, so any web server can replace it.
Connections, requests and bytes per second are limited; refusals are JSON `{code, message, hint}`.
"""

import asyncio
import contextlib
import json
import os
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from io import FileIO
from pathlib import Path

from aiohttp import web

from shoal.broadcast.http.limits import ServerLimits, Throttle
from shoal.broadcast.http.listener import ConnectionLimit, ServerThread
from shoal.broadcast.store import HEAD_FILE, Folder, ShardStore
from shoal.errors import IntegrityError, ShoalError
from shoal.files import is_digest
from shoal.identity import Envelope
from shoal.metrics import EventLog
from shoal.net import UnderWay, address_block

MAX_WAIT_S = 30.0
REFRESH_EVERY_S = 30.0
THROTTLED_PIECE_BYTES = 64 << 10
PIECE_BYTES = 8 << 20
SLOWEST_BYTES_S = 1 << 10
IMMUTABLE = {
    "Cache-Control": "public, max-age=31536000, immutable",
    "Content-Type": "application/octet-stream",
    "Accept-Ranges": "bytes",
}
POINTER = {"Cache-Control": "no-store", "Content-Type": "application/json"}


class DirectoryServer:
    """The aiohttp application of one directory; lives on one event loop."""

    def __init__(
        self,
        store: ShardStore,
        *,
        metrics: EventLog | None = None,
        limits: ServerLimits | None = None,
        expected: Callable[[str], bool] | None = None,
    ) -> None:
        """`expected` says which files are on their way; without it nothing ever is."""
        self._store = store
        self._metrics = metrics or EventLog()
        self._limits = limits or ServerLimits()
        self._expected = expected
        self._throttle = Throttle(self._limits)
        self._requests = UnderWay(self._limits.requests_per_client, self._limits.requests_total)
        self._pointer = HeadPointer()
        self._waiters = FileWaiters()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._limit], client_max_size=1024)
        app.router.add_get("/head.json", self._get_head)
        app.router.add_get("/descriptor.json", self._get_descriptor)
        app.router.add_get("/{folder:shards|manifests}/{digest}", self._get_file)
        app.cleanup_ctx.append(self._follow_store)
        app.on_shutdown.append(self._release_waiting)
        return app

    async def _follow_store(self, app: web.Application) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def stored(name: str) -> None:
            # The loop may be gone when a last shard arrives during shutdown.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._read_head if name == HEAD_FILE else self._waiters.notify, name)

        self._store.listeners.append(stored)
        self._read_head(HEAD_FILE)
        yield
        self._store.listeners.remove(stored)

    def _read_head(self, name: str) -> None:
        data = self._store.head()
        if data is not None:
            # Torn by a power cut; the next head replaces it.
            with contextlib.suppress(IntegrityError, ValueError, KeyError, TypeError, RecursionError):
                self._pointer.replace(data)

    async def _release_waiting(self, app: web.Application) -> None:
        self._pointer.close()
        self._waiters.close()

    async def _get_head(self, request: web.Request) -> web.StreamResponse:
        newer_than = _number(request, "newer_than", -1)
        wait_s = min(_number(request, "wait_s", 0), MAX_WAIT_S)
        data = await self._pointer.get(newer_than, wait_s)
        if data is None:
            return refusal(503, "no_head", "Nothing has been published here yet.", "Try again, or ask another relay.")
        self._metrics.count("bytes_sent", len(data))
        return web.Response(body=data, headers=POINTER)

    async def _get_descriptor(self, request: web.Request) -> web.StreamResponse:
        path = self._store.root / "descriptor.json"
        if not path.exists():
            return refusal(404, "no_descriptor", "There is no run descriptor here.")
        return web.Response(body=path.read_bytes(), headers=POINTER)

    async def _get_file(self, request: web.Request) -> web.StreamResponse:
        folder: Folder = "shards" if request.match_info["folder"] == "shards" else "manifests"
        digest = request.match_info["digest"]
        if not is_digest(digest):
            return refusal(404, "not_a_digest", "Files here are named by their digest.")
        expected = self._expected
        if not await self._recovered(folder, digest) and expected is not None:
            # Even for an unknown name: the client may know of a new version a moment before we do.
            await self._waiters.wait(digest, min(_number(request, "wait_s", 0), MAX_WAIT_S))
        path = self._store.path(folder, digest)
        if not self._store.has(folder, digest) or not path.exists():
            if expected is not None and expected(digest):
                return refusal(503, "not_yet", f"{digest[:12]}… is on its way here.", "Try again or ask another relay.")
            return refusal(404, "unknown_file", f"There is no {digest[:12]}… here.")
        self._store.access.touch(digest)
        body = FileBody(path, self._throttle, self._metrics, self._limits.stalled_after_s)
        await body.send(request)
        return body

    async def _recovered(self, folder: Folder, digest: str) -> bool:
        """Whether the file is here and right; one from before a restart is hashed now, beside the event loop."""
        if self._store.has(folder, digest) or not self._store.may_have(folder, digest):
            return self._store.has(folder, digest)
        return await asyncio.get_running_loop().run_in_executor(None, self._store.recover, folder, digest)

    @web.middleware
    async def _limit(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        client = address_block(request.remote or "")
        protocol = request.transport.get_protocol() if request.transport is not None else None
        if isinstance(protocol, ConnectionLimit):
            protocol.asked()
        if not self._requests.enter(client):
            return refusal(429, "too_many_requests", "Too many requests at once.", "Use fewer connections.")
        try:
            return await handler(request)
        finally:
            self._requests.leave(client)


class HeadPointer:
    """The head, and those who wait for a newer one; lives on one event loop."""

    def __init__(self) -> None:
        self._data: bytes | None = None
        self._counter = 0
        self._changed = asyncio.Event()
        self._closed = False

    async def get(self, newer_than: float, wait_s: float) -> bytes | None:
        """The head as soon as its counter passes `newer_than`, or what there is when the wait is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self._closed and self._counter <= newer_than:
                    await self._changed.wait()
        return self._data

    def replace(self, data: bytes) -> None:
        self._counter = int(json.loads(Envelope.from_bytes(data).payload)["counter"])
        self._data = data
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        self._closed = True
        self._changed.set()


class FileWaiters:
    """Requests for files that are on their way; lives on one event loop."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    async def wait(self, digest: str, wait_s: float) -> None:
        arrived = asyncio.Event()
        self._waiting[digest].add(arrived)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await arrived.wait()
        finally:
            self._waiting[digest].discard(arrived)
            if not self._waiting[digest]:
                del self._waiting[digest]

    def notify(self, digest: str) -> None:
        for arrived in self._waiting.get(digest, ()):
            arrived.set()

    def close(self) -> None:
        for digest in list(self._waiting):
            self.notify(digest)


class FileBody(web.StreamResponse):
    """A whole file or one range of it, sent by the kernel, in pieces where bytes per second are limited."""

    def __init__(self, path: Path, throttle: Throttle, metrics: EventLog, stalled_after_s: float) -> None:
        super().__init__(headers=IMMUTABLE)
        self._path = path
        self._throttle = throttle
        self._metrics = metrics
        self._stalled_after_s = stalled_after_s

    async def send(self, request: web.BaseRequest) -> None:
        # Opened here, not on a thread: the files are small and in the page cache, a hop costs more than the call.
        with open(self._path, "rb", buffering=0) as file:
            start, end = self._range(request, os.fstat(file.fileno()).st_size)
            self.content_length = end - start
            await self.prepare(request)
            if request.method != "HEAD":
                async with self._throttle.turn():
                    await self._send_pieces(request, file, start, end)
            await self.write_eof()

    def _range(self, request: web.BaseRequest, size: int) -> tuple[int, int]:
        try:
            wanted = request.http_range
        except ValueError:
            wanted = slice(size, None, 1)
        if wanted == slice(None, None, 1):
            return 0, size
        start, end, _ = wanted.indices(size)
        if start >= end:
            self.set_status(416)
            self.headers["Content-Range"] = f"bytes */{size}"
            return 0, 0
        self.set_status(206)
        self.headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        return start, end

    async def _send_pieces(self, request: web.BaseRequest, file: FileIO, start: int, end: int) -> None:
        loop = asyncio.get_running_loop()
        client = address_block(request.remote or "")
        piece_bytes = THROTTLED_PIECE_BYTES if self._throttle.active else PIECE_BYTES
        while start < end:
            count = min(end - start, piece_bytes)
            await self._throttle.take(client, count)
            if request.transport is None:
                raise ConnectionResetError("the client is gone")
            # A piece may take as long as the slowest link needs that a client puts up with.
            async with asyncio.timeout(self._stalled_after_s + count / SLOWEST_BYTES_S):
                await loop.sendfile(request.transport, file, start, count)
            start += count
            self._metrics.count("bytes_sent", count)


class OriginServer:
    """Serves an origin's directory from the trainer's own process, and keeps its head from expiring."""

    def __init__(
        self,
        store: ShardStore,
        host: str,
        port: int,
        *,
        metrics: EventLog | None = None,
        limits: ServerLimits | None = None,
        refresh: Callable[[], None] | None = None,
        refresh_every_s: float = REFRESH_EVERY_S,
    ) -> None:
        self._refresh, self._refresh_every_s = refresh, refresh_every_s
        self._stopping = threading.Event()
        self._refresher = threading.Thread(target=self._keep_fresh, name="head refresher", daemon=True)
        self._metrics = metrics or EventLog()
        directory = DirectoryServer(store, metrics=metrics, limits=limits)
        self._server = ServerThread(directory.application, host, port, name="origin", limits=limits)

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def port(self) -> int:
        return self._server.port

    def start(self) -> None:
        self._server.start()
        self._refresher.start()

    def stop(self) -> None:
        self._stopping.set()
        self._server.stop()

    def _keep_fresh(self) -> None:
        while self._refresh is not None and not self._stopping.wait(self._refresh_every_s):
            try:
                self._refresh()
            except ShoalError as error:  # a full disk, which the owner can cure before the head expires
                self._metrics.event("trouble", reason=str(error))


def refusal(status: int, code: str, message: str, hint: str = "") -> web.Response:
    return web.json_response({"code": code, "message": message, "hint": hint}, status=status)


def _number(request: web.Request, name: str, default: float) -> float:
    try:
        value = float(request.query.get(name, default))
    except ValueError:
        return default
    return value if value == value else default
