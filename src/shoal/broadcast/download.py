"""Many shards over several connections at once, with one deadline and one account of progress; and what is said about it."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from shoal.broadcast.manifest import ShardEntry
from shoal.broadcast.peers import Deadline, Sources
from shoal.metrics import Report
from shoal.metrics.units import size

PROGRESS_EVERY_S = 3.0


@dataclass
class DownloadProgress:
    version: int
    bytes_total: int
    bytes_done: int = 0
    bytes_found: int = 0
    """Of those that are done, what an earlier fetch left here."""
    clock: Callable[[], float] = time.monotonic
    started: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def bytes_left(self) -> int:
        return self.bytes_total - self.bytes_done

    @property
    def bytes_s(self) -> float:
        """As fast as bytes came in; what was here already did not come in."""
        return (self.bytes_done - self.bytes_found) / max(self.clock() - self.started, 1e-6)

    @property
    def left_s(self) -> float:
        """How long the rest takes at the rate so far."""
        return self.bytes_left / self.bytes_s if self.bytes_s else math.inf

    def line(self) -> str:
        share = self.bytes_done / self.bytes_total if self.bytes_total else 1.0
        done, total, rate = (size(number) for number in (self.bytes_done, self.bytes_total, self.bytes_s))
        text = f"version {self.version}: {done} of {total} ({share:.0%}), {rate}/s"
        if not self.bytes_left:
            return f"{text}, checking it"
        return f"{text}, {duration(self.left_s)} left" if math.isfinite(self.left_s) else text


def duration(seconds: float) -> str:
    """To a person's precision: 40 s, 12 min, 2 h 50 min, 3 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 36 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes / 60 / 24:.0f} days"


StopWhen = Callable[[DownloadProgress], bool]
OnProgress = Callable[[DownloadProgress], None]


class ShardFetch:
    """Fetches the shards of one plan; ends early when `stop_when(progress)` is true after a shard."""

    def __init__(
        self,
        sources: Sources,
        progress: DownloadProgress,
        *,
        on_progress: OnProgress | None,
        stop_when: StopWhen | None,
        connections: int,
        deadline: Deadline,
    ) -> None:
        self._sources = sources
        self._progress = progress
        self._on_progress = on_progress
        self._stop_when = stop_when
        self._connections = connections
        self._deadline = deadline
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def run(
        self,
        shards: Sequence[ShardEntry],
        missing: Sequence[tuple[int, ShardEntry]],
        sink: Callable[[int, memoryview], None],
    ) -> bool:
        """Hand every missing shard, verified, to `sink`; whether all came. The first error ends it."""
        found = sum(shard.size_bytes for shard in shards) - sum(shard.size_bytes for _, shard in missing)
        self._progress.bytes_found += found
        self._advance(found)
        queue = iter(missing)

        def work() -> None:
            try:
                while not self._stopped.is_set():
                    with self._lock:
                        item = next(queue, None)
                    if item is None:
                        return
                    sink(item[0], self._sources.shard(item[1], deadline=self._deadline))
                    self._advance(item[1].size_bytes)
            except BaseException:
                self._stopped.set()
                raise

        with ThreadPoolExecutor(self._connections, thread_name_prefix="shards") as pool:
            for worker in [pool.submit(work) for _ in range(min(self._connections, len(missing)))]:
                worker.result()
        return not self._stopped.is_set()

    def still_working(self) -> None:
        """No bytes arrive while a delta is applied, but it goes on."""
        self._deadline.progress()
        if self._on_progress is not None:
            self._on_progress(self._progress)

    def _advance(self, size_bytes: int) -> None:
        with self._lock:
            self._progress.bytes_done += size_bytes
        if self._on_progress is not None:
            self._on_progress(self._progress)
        if self._stop_when is not None and self._stop_when(self._progress):
            self._stopped.set()


class ProgressLine:
    """Says every few seconds how far a slow fetch is; a fast one passes in silence."""

    def __init__(self, report: Report, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._report, self._clock = report, clock
        self._next_at = clock() + PROGRESS_EVERY_S

    def __call__(self, progress: DownloadProgress) -> None:
        if self._clock() >= self._next_at:
            self._next_at = self._clock() + PROGRESS_EVERY_S
            self._report(f"fetching {progress.line()}")


class MirrorProgress:
    """How far a relay is with all that its head names; every head begins a new account. Safe to use from several threads."""

    def __init__(self, report: Report, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._report, self._clock = report, clock
        self._line = ProgressLine(report, clock=clock)
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._progress = DownloadProgress(0, 0, clock=clock)

    def begin(self, version: int, sizes: Mapping[str, int]) -> None:
        """`sizes` are the bytes of each shard that is not here, or not verified yet, by its digest."""
        with self._lock:
            self._sizes, self._line = dict(sizes), ProgressLine(self._report, clock=self._clock)
            self._progress = DownloadProgress(version, sum(sizes.values()), clock=self._clock)

    def arrived(self, digest: str, *, was_here: bool) -> None:
        with self._lock:
            size_bytes = self._sizes.pop(digest, 0)
            self._progress.bytes_done += size_bytes
            self._progress.bytes_found += size_bytes if was_here else 0
            self._line(self._progress)
