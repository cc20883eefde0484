"""The newest head that anybody vouched for: signed, not expired, never older than one already seen.

The highest head is kept in a file, so a restart cannot be rolled back either. A long poll asks two relays at once, so one that
withholds news delays nobody; answers that arrive late still count for the next call.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

from shoal.broadcast.manifest import MAX_HEAD_BYTES, Head, VersionEntry, open_head
from shoal.broadcast.peers import Sources
from shoal.errors import IntegrityError, ShoalError, UnavailableError
from shoal.files import write_atomic

MAX_LONG_POLL_S = 20.0
MOST_POLLS = 4
PATIENCE_S = 5.0
POLL_PAUSE_S = 0.5


class HeadWatch:
    """Safe to use from several threads."""

    def __init__(
        self,
        sources: Sources,
        run_key: str,
        path: Path,
        *,
        run_id: str = "",
        always_ask: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._sources = sources
        self._run_key = run_key
        self._run_id = run_id
        # Relays that only asked each other could all miss what their parents know.
        self._always_ask = [url.rstrip("/") for url in always_ask]
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._polls: dict[str, Future[None]] = {}
        self._data, self._head = self._load()

    @property
    def newest(self) -> Head | None:
        return self._head

    @property
    def newest_bytes(self) -> bytes:
        return self._data

    def get(self, *, newer_than: int | None, wait_s: float, deadline_s: float) -> Head:
        """The newest head; waits up to `wait_s` for one above `newer_than`, and answers with what there is after that."""
        started = self._sources.clock()
        wait_until = started + min(wait_s, deadline_s)
        problems: dict[str, str] = {}
        while True:
            long_poll_s = max(0.0, min(wait_until - self._sources.clock(), MAX_LONG_POLL_S))
            self._ask_some(newer_than, long_poll_s, started + deadline_s, problems)
            now = self._sources.clock()
            head = self._head
            fresh = head is not None and head.expires_at > self._clock()
            if head is not None and fresh and (newer_than is None or head.counter > newer_than or now >= wait_until):
                return head
            if now + POLL_PAUSE_S >= started + deadline_s or self._sources.pause(POLL_PAUSE_S):
                break
        if head is not None and not fresh:
            problems["the newest head known"] = f"expired {self._clock() - head.expires_at:.0f} s ago"
        told = "; ".join(f"{url}: {problem}" for url, problem in problems.items()) or "no relay is known"
        raise UnavailableError(f"No relay showed a valid head within {deadline_s:.0f} s ({told}).")

    def _ask_some(self, newer_than: int | None, wait_s: float, deadline: float, problems: dict[str, str]) -> None:
        """Start polls until some are under way and wait for the first news, or for all of them."""
        known = self._counter() if newer_than is None else newer_than
        if newer_than is not None and self._counter() > newer_than:
            return
        asked = self._start_polls(newer_than, wait_s, deadline)
        pending = set(asked.values())
        until = min(deadline, self._sources.clock() + wait_s + PATIENCE_S)
        while pending:
            remaining = until - self._sources.clock()
            done, pending = wait(pending, timeout=max(0.0, remaining), return_when=FIRST_COMPLETED)
            for url, poll in asked.items():
                error = poll.exception() if poll in done else None
                if isinstance(error, ShoalError):
                    problems[url] = str(error)
                elif error is not None:
                    raise error
            if not done or self._counter() > known:
                return

    def _counter(self) -> int:
        return self._head.counter if self._head is not None else 0

    def _start_polls(self, newer_than: int | None, wait_s: float, deadline: float) -> dict[str, Future[None]]:
        """Long polls under way are joined, so that a relay has one of ours at a time; short ones are always new."""
        urls = self._sources.urls()
        with self._lock:
            under_way = {url: poll for url, poll in self._polls.items() if url in urls and not poll.done()}
            asked = under_way if wait_s > 0 else {}
            if len(asked) >= min(len(urls), MOST_POLLS):
                return asked
            for choice in (self._always_ask or urls, urls):
                url = self._sources.book.choose(choice, avoid=asked)
                if url is not None:
                    asked[url] = self._start_poll(url, newer_than, wait_s, deadline)
            self._polls = under_way | asked
            return asked

    def _start_poll(self, url: str, newer_than: int | None, wait_s: float, deadline: float) -> Future[None]:
        future: Future[None] = Future()

        def poll() -> None:
            try:
                self._poll(url, newer_than, wait_s, deadline)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=poll, name=f"head of {url}", daemon=True).start()
        return future

    def _poll(self, url: str, newer_than: int | None, wait_s: float, deadline: float) -> None:
        query = f"?newer_than={newer_than}&wait_s={wait_s:g}" if newer_than is not None and wait_s > 0 else ""
        started = self._sources.clock()
        until = min(deadline, started + wait_s + PATIENCE_S)
        try:
            data = self._sources.pool.fetch(url, f"/head.json{query}", max_bytes=MAX_HEAD_BYTES, deadline=until)
            self._accept(data)
        except ShoalError as error:
            self._sources.blame(url, "head.json", error)
            raise
        self._sources.book.record_success(url, len(data), self._sources.clock() - started)

    def _accept(self, data: bytes) -> None:
        head = open_head(data, self._run_key)
        if self._run_id and head.run_id != self._run_id:
            raise IntegrityError(f"a head of run {head.run_id} instead of {self._run_id}")
        if head.expires_at <= self._clock():
            # Honest when its own parents are gone, so not a lie; but of no use either.
            raise UnavailableError(f"a head that expired {self._clock() - head.expires_at:.0f} s ago")
        with self._lock:
            if self._head is None or head.counter > self._head.counter:
                write_atomic(self._path, data)
                self._data, self._head = data, head

    def _load(self) -> tuple[bytes, Head | None]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return b"", None
        return data, open_head(data, self._run_key)


class HeadNews:
    """Listens for newer heads in the background while something else is done; used as a context."""

    def __init__(self, watch: HeadWatch, counter: int, deadline_s: float) -> None:
        self._watch = watch
        self._counter = counter
        self._deadline_s = deadline_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="head news", daemon=True)

    @property
    def newest(self) -> VersionEntry | None:
        head = self._watch.newest
        return head.newest if head is not None else None

    def __enter__(self) -> "HeadNews":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()

    def _listen(self) -> None:
        while not self._done.is_set():
            try:
                head = self._watch.get(newer_than=self._counter, wait_s=MAX_LONG_POLL_S, deadline_s=self._deadline_s)
            except ShoalError:
                # Whoever fetches meets the same trouble and says so.
                return
            self._counter = head.counter
