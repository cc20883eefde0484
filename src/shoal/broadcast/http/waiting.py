"""What requests wait for: a newer head, or a file that is on its way.

Both live on one event loop. The head is watched on disk, so whoever writes it need not live in this process.
"""

import asyncio
import contextlib
import json
import os
from collections import defaultdict
from pathlib import Path

from shoal.errors import IntegrityError
from shoal.identity import Envelope

WATCH_INTERVAL_S = 0.01


class HeadPointer:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._data: bytes | None = None
        self._counter = 0
        self._changed = asyncio.Event()
        self._closed = False

    async def get(self, newer_than: float, wait_s: float) -> bytes | None:
        """The head as soon as its counter passes `newer_than`, or what there is when the wait is over."""
        self._look()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self._closed and self._counter <= newer_than:
                    await self._changed.wait()
        return self._data

    async def watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(WATCH_INTERVAL_S)

    def close(self) -> None:
        self._closed = True
        self._changed.set()

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
