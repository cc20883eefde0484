"""Serve a published directory: immutable files with ranges, and one pointer that can be waited for.

GET /head.json?newer_than=COUNTER&wait_s=S answers as soon as the head's counter passes COUNTER. GET /shards/DIGEST?wait_s=S
holds the request for a file that is on its way. Everything else is a plain static file, so any web server can stand in.
Requests per client and in all are limited; refusals are JSON `{code, message, hint}`.
"""

import asyncio
import contextlib
import json
import os
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from shoal.broadcast.store import Folder, Readers, Store
from shoal.errors import IntegrityError, UnavailableError
from shoal.files import is_digest
from shoal.identity import Envelope
from shoal.metrics import Metrics

MAX_WAIT_S = 30.0
WATCH_INTERVAL_S = 0.025
IMMUTABLE = {"Cache-Control": "public, max-age=31536000, immutable", "Content-Type": "application/octet-stream"}
POINTER = {"Cache-Control": "no-store", "Content-Type": "application/json"}


@dataclass(frozen=True)
class ServerLimits:
    requests_per_client: int = 64
    requests_total: int = 1024


class DirectoryServer:
    """The aiohttp application of one directory; lives on one event loop."""

    def __init__(
        self,
        store: Store,
        *,
        readers: Readers | None = None,
        metrics: Metrics | None = None,
        limits: ServerLimits | None = None,
        expected: Callable[[str], bool] = lambda digest: False,
    ) -> None:
        self._store = store
        self._readers = readers or Readers()
        self._metrics = metrics or Metrics()
        self._limits = limits or ServerLimits()
        self._expected = expected
        self._pointer = HeadPointer(store.root / "head.json")
        self._arrivals = Arrivals()
        self._active: Counter[str] = Counter()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._limit], client_max_size=1024)
        app.router.add_get("/head.json", self._get_head)
        app.router.add_get("/descriptor.json", self._get_descriptor)
        app.router.add_get("/{folder:shards|manifests}/{digest}", self._get_file)
        app.cleanup_ctx.append(self._watch)
        app.on_shutdown.append(self._release_waiting)
        return app

    async def _watch(self, app: web.Application) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def arrived(digest: str) -> None:
            # The loop may be gone when a last shard arrives during shutdown.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._arrivals.notify, digest)

        self._store.on_put = arrived
        task = asyncio.create_task(self._pointer.watch())
        yield
        self._store.on_put = None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _release_waiting(self, app: web.Application) -> None:
        self._pointer.close()
        self._arrivals.close()

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
        return web.FileResponse(path, headers=POINTER)

    async def _get_file(self, request: web.Request) -> web.StreamResponse:
        folder: Folder = "shards" if request.match_info["folder"] == "shards" else "manifests"
        digest = request.match_info["digest"]
        if not is_digest(digest):
            return refusal(404, "not_a_digest", "Files here are named by their digest.")
        path = self._store.path(folder, digest)
        if not path.exists():
            if not self._expected(digest):
                return refusal(404, "unknown_file", f"There is no {digest[:12]}… here.")
            await self._arrivals.wait(digest, min(_number(request, "wait_s", 0), MAX_WAIT_S))
            if not path.exists():
                return refusal(
                    503, "not_yet", f"{digest[:12]}… is on its way here.", "Try again, or ask another relay."
                )
        self._readers.touch(digest)
        return _CountedFile(path, self._metrics)

    @web.middleware
    async def _limit(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        client = request.remote or ""
        if (
            self._active[client] >= self._limits.requests_per_client
            or self._active.total() >= self._limits.requests_total
        ):
            return refusal(429, "too_many_requests", "Too many requests at once.", "Use fewer connections.")
        self._active[client] += 1
        try:
            return await handler(request)
        finally:
            self._active[client] -= 1
            if not self._active[client]:
                del self._active[client]


class _CountedFile(web.FileResponse):
    def __init__(self, path: Path, metrics: Metrics) -> None:
        super().__init__(path, chunk_size=1 << 18, headers=IMMUTABLE)
        self._metrics = metrics

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        writer = await super().prepare(request)
        self._metrics.count("bytes_sent", self.content_length or 0)
        return writer


class HeadPointer:
    """The current head.json. It is watched on disk, so that whoever writes it need not live in this process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._data: bytes | None = None
        self._counter = 0
        self._changed = asyncio.Event()
        self._closed = False

    async def get(self, newer_than: float, wait_s: float) -> bytes | None:
        self._look()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self._closed and self._counter <= newer_than:
                    await self._changed.wait()
        return self._data

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    async def watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _look(self) -> None:
        try:
            status = os.stat(self._path)
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp == self._stamp:
                return
            data = self._path.read_bytes()
            self._counter = int(json.loads(Envelope.from_bytes(data).payload)["counter"])
        except (FileNotFoundError, IntegrityError):
            return
        self._stamp, self._data = stamp, data
        self._changed.set()
        self._changed = asyncio.Event()


class Arrivals:
    """Requests that wait for a file on its way."""

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

    def close(self) -> None:
        for digest in list(self._waiting):
            self.notify(digest)

    def notify(self, digest: str) -> None:
        for arrived in self._waiting.get(digest, ()):
            arrived.set()


class ServerThread:
    """An application on an event loop of its own thread; `start` returns when it listens."""

    def __init__(self, build: Callable[[], web.Application], host: str, port: int, *, name: str) -> None:
        self._build = build
        self._host = host
        self._port = port
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._runner: web.AppRunner | None = None
        self.port = port

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self._host in ("0.0.0.0", "") else self._host
        return f"http://{host}:{self.port}"

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(timeout=30)
        except OSError as error:
            self.stop()
            reason = error.strerror or str(error)
            message = f"The {self._name} cannot listen on {self._host}:{self._port}: {reason}."
            raise UnavailableError(message, hint="Choose another port, or stop whoever uses it.") from None

    def stop(self) -> None:
        if self._thread is None:
            return
        if self._runner is not None:
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()
        self._thread = None

    async def _listen(self) -> None:
        self._runner = web.AppRunner(
            self._build(), access_log=None, keepalive_timeout=60, shutdown_timeout=1, handler_cancellation=True
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=512)
        await site.start()
        self.port = self._runner.addresses[0][1]


class OriginServer:
    """Serves an origin's directory from the trainer's own process, and keeps its head from expiring."""

    def __init__(
        self,
        root: Path,
        host: str,
        port: int,
        *,
        readers: Readers | None = None,
        metrics: Metrics | None = None,
        limits: ServerLimits | None = None,
        refresh: Callable[[], None] | None = None,
        refresh_every_s: float = 30.0,
    ) -> None:
        self._refresh = refresh
        self._refresh_every_s = refresh_every_s
        self._stopping = threading.Event()
        self._refresher = threading.Thread(target=self._keep_fresh, name="head refresher", daemon=True)

        def build() -> web.Application:
            return DirectoryServer(Store(root), readers=readers, metrics=metrics, limits=limits).application()

        self._server = ServerThread(build, host, port, name="origin")

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
            self._refresh()


def serve_origin(root: Path, host: str, port: int) -> OriginServer:
    """Serve a directory that somebody publishes into, until `stop`."""
    server = OriginServer(root, host, port)
    server.start()
    return server


def refusal(status: int, code: str, message: str, hint: str = "") -> web.Response:
    return web.json_response({"code": code, "message": message, "hint": hint}, status=status)


def _number(request: web.Request, name: str, default: float) -> float:
    try:
        value = float(request.query.get(name, default))
    except ValueError:
        return default
    return value if value == value else default
