"""What requests wait for: a newer head, or a file that is on its way. Both live on one event loop."""

import asyncio
import contextlib
import json
from collections import defaultdict

from shoal.identity import Envelope


class HeadPointer:
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
