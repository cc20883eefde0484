"""Many shards over several connections at once, with one deadline and one account of progress."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from shoal.broadcast.manifest import ShardEntry
from shoal.broadcast.peers import Sources
from shoal.broadcast.progress import OnProgress, Progress


class ShardFetch:
    """Fetches the shards of one plan; `on_progress` may raise to give up."""

    def __init__(
        self,
        sources: Sources,
        progress: Progress,
        on_progress: OnProgress | None,
        *,
        connections: int,
        deadline: float,
    ) -> None:
        self._sources = sources
        self._progress = progress
        self._on_progress = on_progress
        self._connections = connections
        self._deadline = deadline
        self._lock = threading.Lock()

    def run(
        self,
        shards: Sequence[ShardEntry],
        missing: Sequence[tuple[int, ShardEntry]],
        sink: Callable[[int, memoryview], None],
    ) -> None:
        """Hand every missing shard, verified, to `sink`; the first error ends it all."""
        self._advance(sum(shard.size_bytes for shard in shards) - sum(shard.size_bytes for _, shard in missing))
        queue = iter(missing)
        failed = threading.Event()

        def work() -> None:
            try:
                while not failed.is_set():
                    with self._lock:
                        item = next(queue, None)
                    if item is None:
                        return
                    sink(item[0], self._sources.shard(item[1], deadline=self._deadline))
                    self._advance(item[1].size_bytes)
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(self._connections, thread_name_prefix="shards") as pool:
            for worker in [pool.submit(work) for _ in range(min(self._connections, len(missing)))]:
                worker.result()

    def _advance(self, size_bytes: int) -> None:
        with self._lock:
            self._progress.bytes_done += size_bytes
        if self._on_progress is not None:
            self._on_progress(self._progress)
