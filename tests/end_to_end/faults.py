"""A network that behaves badly on purpose: an HTTP proxy that loses, doubles, delays and cuts requests and answers.

What happens to a request is drawn from a seed, never from its content. A lost request did not reach the server, a lost answer
did: the client cannot tell which. A doubled request reaches the server twice, the second answer is the one that is passed on.
"""

import asyncio
import random
import threading
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import aiohttp
from aiohttp import web
from yarl import URL

Fault = Literal["none", "lost_request", "lost_answer", "doubled", "delayed", "cut_answer"]

START_DEADLINE_S = 10.0
SERVER_DEADLINE_S = 60.0
LARGEST_BODY = 1 << 30
HOP_HEADERS = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host"})
"""They describe one connection, not the message."""


@dataclass(frozen=True)
class FaultRates:
    """Shares of all requests; what is left passes unharmed."""

    lost_request: float = 0.02
    lost_answer: float = 0.02
    doubled: float = 0.02
    delayed: float = 0.03
    cut_answer: float = 0.01
    longest_delay_s: float = 2.0

    def draw(self, random_source: random.Random) -> Fault:
        left = random_source.random()
        faults: tuple[Fault, ...] = ("lost_request", "lost_answer", "doubled", "delayed", "cut_answer")
        for fault in faults:
            left -= getattr(self, fault)
            if left < 0:
                return fault
        return "none"


class FaultyProxy:
    """Serves on a free port from a thread of its own while the context lasts; `counts` says what it did."""

    def __init__(self, target: str, rates: FaultRates | None = None, *, seed: int = 0, port: int = 0) -> None:
        self.target, self.rates, self.port = target.rstrip("/"), rates or FaultRates(), port
        self.counts: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-proxy", daemon=True)
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "FaultyProxy":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(START_DEADLINE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(START_DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_DEADLINE_S)
        self._loop.close()

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(
            auto_decompress=False, timeout=aiohttp.ClientTimeout(total=SERVER_DEADLINE_S)
        )
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        assert self._runner is not None
        assert self._session is not None
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        fault = self.rates.draw(self._random)
        self.counts[fault] += 1
        body = await request.read()
        if fault == "lost_request":
            return _hang_up(request)
        if fault == "delayed":
            await asyncio.sleep(self._random.uniform(0, self.rates.longest_delay_s))
        try:
            if fault == "doubled":
                await self._forward(request, body)
            status, headers, answer = await self._forward(request, body)
        except (aiohttp.ClientError, TimeoutError):
            self.counts["server_away"] += 1
            return _hang_up(request)
        if fault == "lost_answer":
            return _hang_up(request)
        try:
            return await _answer(request, status, headers, answer, cut=fault == "cut_answer")
        except ConnectionError:  # the client has hung up meanwhile
            return _hang_up(request)

    async def _forward(self, request: web.Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
        assert self._session is not None
        url = URL(self.target + request.raw_path, encoded=True)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_HEADERS}
        async with self._session.request(
            request.method, url, data=body or None, headers=headers, allow_redirects=False
        ) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_HEADERS}
            return answer.status, kept, await answer.read()


async def _answer(
    request: web.Request, status: int, headers: dict[str, str], body: bytes, *, cut: bool
) -> web.StreamResponse:
    response = web.StreamResponse(status=status, headers=headers)
    response.content_length = None if request.method == "HEAD" else len(body)
    await response.prepare(request)
    await response.write(body[: len(body) // 2] if cut else body)
    if cut and body:
        return _hang_up(request)
    await response.write_eof()
    return response


def _hang_up(request: web.Request) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)
