"""Uploads whose bytes are arriving: one per lease, counted against the disk's free space while they come.

What strangers sent stays counted until a verdict accepts it or the file is gone, so complete junk fills no more than open junk.

A newer upload of the same lease ends the older one, whose file is removed: a worker that lost its connection must not wait for its
own remains, and a lease never holds more than one file. Belongs to one event loop.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from shoal.coordinator.rules import space
from shoal.coordinator.run import Run, disk_full
from shoal.errors import RefusedError

Result = TypeVar("Result")

CHECK_EVERY_BYTES = 1 << 20


class OpenUploads:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._by_lease: dict[str, asyncio.Task[Any]] = {}
        self._strangers_bytes = 0
        self._strangers_kept_bytes = 0

    def __len__(self) -> int:
        return len(self._by_lease)

    async def receive(self, lease_id: str, transfer: Coroutine[Any, Any, Result]) -> Result:
        """What the transfer returns, once no other one of this lease is open."""
        older, task = self._by_lease.get(lease_id), asyncio.ensure_future(transfer)
        self._by_lease[lease_id] = task
        try:
            if older is not None:
                older.cancel()
                await asyncio.wait([older])
            return await task
        except asyncio.CancelledError:
            task.cancel()
            if self._by_lease.get(lease_id) is task:
                raise
            raise RefusedError("superseded", "A newer upload of this lease has begun.", status=409) from None
        finally:
            if self._by_lease.get(lease_id) is task:
                del self._by_lease[lease_id]

    @contextmanager
    def counted(self, *, is_stranger: bool) -> Iterator[Callable[[int], None]]:
        """Counts every chunk that it is called with, and refuses one for which there is no space."""
        arrived = checked = 0

        def count(size_bytes: int) -> None:
            nonlocal arrived, checked
            arrived += size_bytes
            self._strangers_bytes += size_bytes if is_stranger else 0
            if arrived - checked >= CHECK_EVERY_BYTES:
                checked = arrived
                self.require_space(is_stranger=is_stranger)

        try:
            yield count
        finally:
            self._strangers_bytes -= arrived if is_stranger else 0

    def kept(self, size_bytes: int) -> None:
        """A stranger's file is complete."""
        self._strangers_kept_bytes += size_bytes

    def found_kept(self, size_bytes: int) -> None:
        """What the store says of all of them, whichever process took them in."""
        self._strangers_kept_bytes = size_bytes

    def require_space(self, *, is_stranger: bool) -> None:
        run = self._run
        free_bytes = run.known_free_bytes()
        if free_bytes is not None and not space.may_store(
            free_bytes,
            run.min_free_bytes,
            self._strangers_bytes + self._strangers_kept_bytes,
            is_stranger=is_stranger,
        ):
            raise disk_full()
