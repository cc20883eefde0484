"""Server-sent events: what just happened, for every open page, at a cost that does not depend on who reads.

Each message is encoded once and put into a bounded queue per page. A page that does not read loses its stream, never the
coordinator's time or memory; its browser connects again. What an event shows to everybody is listed in PUBLIC_EVENTS alone.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.metrics import Record

QUEUED = 32
"""Messages that wait for a slow page; then it is dropped."""
SEND_S = 10.0
"""For one message to leave."""
QUIET_S = 15.0
"""After this long without an event a comment shows that the stream lives."""
MAX_STREAMS = 512
MAX_STREAMS_PER_ADDRESS = 64
RECONNECT_MS = 3000

PUBLIC_EVENTS: dict[str, tuple[str, ...]] = {
    "verdict": ("worker", "step", "outcome", "reasons"),
    "version": ("version", "reward_mean", "bytes_total"),
    "evaluation": ("version", "accuracy"),
    "registered": ("worker",),
    "alert": ("name", "seen", "advice"),
    "alert_over": ("name",),
    "run_state": ("state",),
    "ban": ("worker", "why"),
}
"""Fields of the coordinator's events that everybody may see; other events and fields stay on the owner's disk."""


def encode(event: str, fields: dict[str, object]) -> bytes:
    """One message; JSON has no line breaks of its own, so a field cannot end it."""
    return f"event: {event}\ndata: {json.dumps(fields, separators=(',', ':'), default=str)}\n\n".encode()


class EventHub:
    """Gives every message to every open page. Belongs to one event loop."""

    def __init__(self) -> None:
        self._streams: dict[asyncio.Queue[bytes | None], str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._streams)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def hear(self, record: Record) -> None:
        """Takes an event of the coordinator, in whichever thread it happened."""
        fields = PUBLIC_EVENTS.get(record["event"])
        if fields is None or not self._streams or self._loop is None:
            return
        shown = {"at": record["at"], **{name: record[name] for name in fields if name in record}}
        with contextlib.suppress(RuntimeError):  # the loop has ended, and every stream with it
            self._loop.call_soon_threadsafe(self.send, encode(record["event"], shown))

    def send(self, message: bytes) -> None:
        for stream in list(self._streams):
            try:
                stream.put_nowait(message)
            except asyncio.QueueFull:
                self._drop(stream)

    def open(self, address: str) -> "asyncio.Queue[bytes | None] | None":
        """A stream for a page; none if there are too many, or too many of its address."""
        if len(self._streams) >= MAX_STREAMS or Counter(self._streams.values())[address] >= MAX_STREAMS_PER_ADDRESS:
            return None
        stream: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUED)
        self._streams[stream] = address
        return stream

    def close(self, stream: "asyncio.Queue[bytes | None]") -> None:
        self._streams.pop(stream, None)

    def close_all(self) -> None:
        for stream in list(self._streams):
            self._drop(stream)

    def _drop(self, stream: "asyncio.Queue[bytes | None]") -> None:
        self.close(stream)
        with contextlib.suppress(asyncio.QueueEmpty):
            while True:
                stream.get_nowait()
        stream.put_nowait(None)


class EventStream(Response):
    """An answer that lasts as long as its page is open and reads."""

    media_type = "text/event-stream"

    def __init__(self, hub: EventHub, stream: "asyncio.Queue[bytes | None]", first: Callable[[], bytes]) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._hub, self._stream, self._first = hub, stream, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sender, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._hub.close(self._stream)
            for task in (sender, leaving):
                task.cancel()
            await asyncio.gather(sender, leaving, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        message: bytes | None = f"retry: {RECONNECT_MS}\n\n".encode() + self._first()
        while message is not None:
            async with asyncio.timeout(SEND_S):
                await send({"type": "http.response.body", "body": message, "more_body": True})
            message = await self._next()
        await send({"type": "http.response.body", "body": b""})

    async def _next(self) -> bytes | None:
        try:
            return await asyncio.wait_for(self._stream.get(), QUIET_S)
        except TimeoutError:
            return b": still here\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
