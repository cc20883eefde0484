"""The shards that a relay still has to fetch, in order of use, shared by its fetchers.

Each shard has one of two routes: `parents` (this relay fetches it first) or `peers` (another relay does). `replace` sets a new goal
without disturbing what is under way; `expects` says which requests the server should hold. A shard stays queued until it arrives
or is no longer wanted.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from shoal.broadcast.manifest import Encoding, Head, Manifest, ShardEntry

Route = Literal["parents", "peers"]


@dataclass(frozen=True)
class WantedShard:
    shard: ShardEntry
    index: int
    """Place in its encoding, the same for every relay."""
    failures: int = 0

    @property
    def digest(self) -> str:
        return self.shard.digest


class DownloadQueue:
    """Safe to use from several threads."""

    def __init__(self, route: Callable[[WantedShard], Route] = lambda item: "parents") -> None:
        self._route = route
        self._condition = threading.Condition()
        self._queues: dict[Route, dict[str, WantedShard]] = {"parents": {}, "peers": {}}
        self._under_way: dict[str, WantedShard] = {}
        self._announced: set[str] = set()
        self._closed = False

    @property
    def empty(self) -> bool:
        with self._condition:
            return not any(self._queues.values()) and not self._under_way

    def expects(self, digest: str) -> bool:
        queued = any(digest in queue for queue in self._queues.values())
        return queued or digest in self._under_way or digest in self._announced

    def expect(self, digest: str) -> None:
        """A file that is being fetched outside the queue."""
        self._announced.add(digest)

    def replace(self, items: Iterable[WantedShard]) -> None:
        with self._condition:
            self._sort(item for item in items if item.digest not in self._under_way)
            self._announced.clear()

    def reroute(self) -> None:
        """Decide again which route each shard takes: a relay came or went."""
        with self._condition:
            self._sort([item for queue in self._queues.values() for item in queue.values()])

    def take(self, route: Route) -> WantedShard | None:
        """The next shard to fetch by this route; blocks until there is one, None when closed."""
        with self._condition:
            queue = self._queues[route]
            while not queue and not self._closed:
                self._condition.wait()
                queue = self._queues[route]
            if self._closed:
                return None
            item = queue.pop(next(iter(queue)))
            self._under_way[item.digest] = item
            return item

    def done(self, item: WantedShard) -> None:
        with self._condition:
            self._under_way.pop(item.digest, None)

    def put_back(self, item: WantedShard) -> None:
        """Fetch it again, after the others of its route."""
        with self._condition:
            if self._under_way.pop(item.digest, None) is not None:
                again = WantedShard(item.shard, item.index, item.failures + 1)
                self._queues[self._route(again)][item.digest] = again
                self._condition.notify_all()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _sort(self, items: Iterable[WantedShard]) -> None:
        queues: dict[Route, dict[str, WantedShard]] = {"parents": {}, "peers": {}}
        for item in items:
            queues[self._route(item)][item.digest] = item
        self._queues = queues
        self._condition.notify_all()


def wanted_in_order(head: Head, manifests: dict[str, Manifest]) -> list[WantedShard]:
    """What a relay fetches first: small files, then the newest versions, their deltas before their full encodings."""
    newest_first = sorted(manifests.values(), key=lambda manifest: -manifest.version)

    def encodings(kind: str) -> list[Encoding]:
        return [encoding for manifest in newest_first for encoding in manifest.encodings if encoding.kind == kind]

    rows = [
        head.files,
        *(encoding.shards for encoding in encodings("delta")),
        *(encoding.shards for encoding in encodings("full")),
    ]
    wanted: dict[str, WantedShard] = {}
    for row in rows:
        for index, shard in enumerate(row):
            wanted.setdefault(shard.digest, WantedShard(shard, index))
    return list(wanted.values())
