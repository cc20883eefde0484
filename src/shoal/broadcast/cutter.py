"""Cut a stream of bytes into content-addressed shards, hashing and writing on a few threads with bounded memory.

Shards have one size except the last. At most `ahead` shards are in flight, so a model of any size passes through a few
megabytes; an error of a writer surfaces at the next call.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from shoal.broadcast.manifest import ShardEntry
from shoal.broadcast.store import Store
from shoal.files import digest_bytes


class ShardCutter:
    def __init__(self, store: Store, shard_bytes: int, pool: ThreadPoolExecutor, *, ahead: int = 4) -> None:
        self._store = store
        self._shard_bytes = shard_bytes
        self._pool = pool
        self._ahead = ahead
        self._rest = bytearray()
        self._pending: deque[Future[ShardEntry]] = deque()
        self._shards: list[ShardEntry] = []

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next bytes of the stream; they must not change until `settle` or `finish` returns."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        if self._rest:
            room = self._shard_bytes - len(self._rest)
            self._rest += view[:room]
            view = view[room:]
            if len(self._rest) == self._shard_bytes:
                self._submit(self._rest)
                self._rest = bytearray()
        while len(view) >= self._shard_bytes:
            self._submit(view[: self._shard_bytes])
            view = view[self._shard_bytes :]
        self._rest += view

    def settle(self) -> None:
        """Wait until no shard refers to bytes that were fed."""
        while self._pending:
            self._shards.append(self._pending.popleft().result())

    def finish(self) -> tuple[ShardEntry, ...]:
        if self._rest:
            self._submit(self._rest)
            self._rest = bytearray()
        self.settle()
        return tuple(self._shards)

    def _submit(self, data: bytearray | memoryview) -> None:
        if len(self._pending) >= self._ahead:
            self._shards.append(self._pending.popleft().result())
        self._pending.append(self._pool.submit(self._write, data))

    def _write(self, data: bytearray | memoryview) -> ShardEntry:
        digest = digest_bytes(memoryview(data))
        self._store.put("shards", data, digest)
        return ShardEntry(digest=digest, size_bytes=len(data))
