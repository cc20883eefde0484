"""The shards that a relay still has to fetch, in order of use, shared by its fetchers.

`replace` sets a new goal without disturbing what is under way; `expects` tells the server which requests to hold. Nothing is
forgotten until it arrives or is no longer wanted.
"""

import threading
from collections.abc import Iterable

from shoal.broadcast.manifest import ShardEntry


class Wanted:
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._queue: dict[str, ShardEntry] = {}
        self._under_way: dict[str, ShardEntry] = {}
        self._announced: set[str] = set()
        self._closed = False

    @property
    def empty(self) -> bool:
        with self._condition:
            return not self._queue and not self._under_way

    def expects(self, digest: str) -> bool:
        return digest in self._queue or digest in self._under_way or digest in self._announced

    def expect(self, digest: str) -> None:
        """A file that is being fetched outside the queue."""
        self._announced.add(digest)

    def replace(self, shards: Iterable[ShardEntry]) -> None:
        with self._condition:
            self._queue = {shard.digest: shard for shard in shards if shard.digest not in self._under_way}
            self._announced.clear()
            self._condition.notify_all()

    def take(self) -> ShardEntry | None:
        """The next shard to fetch; blocks until there is one, None when closed."""
        with self._condition:
            while not self._queue and not self._closed:
                self._condition.wait()
            if self._closed:
                return None
            digest = next(iter(self._queue))
            shard = self._under_way[digest] = self._queue.pop(digest)
            return shard

    def done(self, shard: ShardEntry) -> None:
        with self._condition:
            self._under_way.pop(shard.digest, None)

    def put_back(self, shard: ShardEntry) -> None:
        """Fetch it again after the others."""
        with self._condition:
            if self._under_way.pop(shard.digest, None) is not None:
                self._queue[shard.digest] = shard
                self._condition.notify()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
