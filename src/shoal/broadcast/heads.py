"""The newest signed head: not expired, never older than one already seen; and the manifests that heads name.

The highest head is kept in a file, so that a restart cannot be rolled back either. A long poll asks two relays at once, so that
one that withholds a new head delays nobody; answers that arrive late still count for the next call.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from shoal.broadcast.manifest import MAX_HEAD_BYTES, Head, Manifest, VersionEntry, open_head, open_manifest
from shoal.broadcast.peers import ABSENT_AFTER_S, Asked, Deadline, Sources
from shoal.broadcast.store import DiskError, ShardStore, disk_error
from shoal.errors import IntegrityError, ShoalError, SignatureError, UnavailableError
from shoal.files import write_atomic

MAX_LONG_POLL_S = 20.0
MAX_POLLS = 4
ANSWER_GRACE_S = 5.0
"""How much longer than the long poll an answer may take."""
POLL_PAUSE_S = 0.5
MANIFESTS_OPEN = 16


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
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._monotonic = monotonic
        self._run_key = run_key
        self._run_id = run_id
        # Relays that only asked each other could all miss what their parents know.
        self._always_ask = [url.rstrip("/") for url in always_ask]
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._polls: dict[str, Future[None]] = {}
        self._newest = self._load()

    @property
    def newest(self) -> Head | None:
        return self._newest[1]

    @property
    def newest_signed(self) -> tuple[bytes, Head | None]:
        """The newest head with the bytes that were signed."""
        return self._newest

    def get(self, *, newer_than: int | None, wait_s: float, deadline_s: float) -> Head:
        """The newest head; waits up to `wait_s` for one above `newer_than`, and answers with what there is after that."""
        started = self._monotonic()
        wait_until = started + min(wait_s, deadline_s)
        problems: dict[str, str] = {}
        while True:
            long_poll_s = max(0.0, min(wait_until - self._monotonic(), MAX_LONG_POLL_S))
            self._ask_some(newer_than, long_poll_s, started + deadline_s, problems)
            now = self._monotonic()
            head = self.newest
            fresh = head is not None and head.expires_at > self._clock()
            if head is not None and fresh and (newer_than is None or head.counter > newer_than or now >= wait_until):
                return head
            if now + POLL_PAUSE_S >= started + deadline_s or self._sources.pause(POLL_PAUSE_S):
                break
        if head is not None and not fresh:
            problems["the newest head known"] = f"expired {self._clock() - head.expires_at:.0f} s ago"
        reasons = "; ".join(f"{url}: {problem}" for url, problem in problems.items()) or "no relay is known"
        raise UnavailableError(
            f"No relay showed a valid head within {deadline_s:.0f} s ({reasons}).", hint=self._hint(reasons)
        )

    def _hint(self, reasons: str) -> str:
        if "trusted key" in reasons:
            return f"If another run was meant, name its key: {self._run_key[:12]}… is trusted here."
        if "expired" not in reasons:
            return ""
        here = time.strftime("%Y-%m-%d %H:%M", time.gmtime(self._clock()))
        return f"Either nothing is published any more, or the clock here, {here} UTC, is wrong: check both."

    def _ask_some(self, newer_than: int | None, wait_s: float, deadline: float, problems: dict[str, str]) -> None:
        """Start polls until some are under way and wait for the first news, or for all of them."""
        known = self._counter() if newer_than is None else newer_than
        if newer_than is not None and self._counter() > newer_than:
            return
        asked = self._start_polls(newer_than, wait_s, deadline)
        pending = set(asked.values())
        until = min(deadline, self._monotonic() + wait_s + ANSWER_GRACE_S)
        while pending:
            remaining = until - self._monotonic()
            done, pending = wait(pending, timeout=max(0.0, remaining), return_when=FIRST_COMPLETED)
            for url, poll in asked.items():
                error = poll.exception() if poll in done else None
                if isinstance(error, ShoalError) and not isinstance(error, DiskError):
                    problems[url] = str(error)
                elif error is not None:  # this disk, which no other relay can help with, or a bug
                    raise error
                elif poll in pending:
                    problems.setdefault(url, "it takes requests and does not answer")
            if not done or self._counter() > known:
                return

    def _counter(self) -> int:
        return self.newest.counter if self.newest is not None else 0

    def _start_polls(self, newer_than: int | None, wait_s: float, deadline: float) -> dict[str, Future[None]]:
        """Long polls under way are joined, so that a relay has one of ours at a time; short ones are always new."""
        urls = self._sources.urls()
        with self._lock:
            under_way = {url: poll for url, poll in self._polls.items() if url in urls and not poll.done()}
            asked = under_way if wait_s > 0 else {}
            if len(asked) >= min(len(urls), MAX_POLLS):
                return asked
            for choice in (self._always_ask or urls, urls):
                url = self._sources.choose(choice, avoid=asked)
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

        def attempt(url: str, until: float) -> None:
            self._accept(self._sources.fetch(url, f"/head.json{query}", max_bytes=MAX_HEAD_BYTES, deadline=until))

        self._sources.ask(url, "head.json", attempt, min(deadline, self._monotonic() + wait_s + ANSWER_GRACE_S))

    def _accept(self, data: bytes) -> None:
        try:
            head = open_head(data, self._run_key)
        except IntegrityError as error:
            # Nobody vouches for these bytes: a head that was cut off, not one that was made up.
            raise UnavailableError(f"bytes that are no whole head: {error}") from None
        if self._run_id and head.run_id != self._run_id:
            raise IntegrityError(f"a head of run {head.run_id} instead of {self._run_id}")
        if head.expires_at <= self._clock():
            # A relay whose parents are gone is honest, so this is no lie.
            raise UnavailableError(f"a head that expired {self._clock() - head.expires_at:.0f} s ago")
        with self._lock:
            if head.counter > self._counter():
                self._save(data)
                self._newest = data, head

    def _save(self, data: bytes) -> None:
        try:
            write_atomic(self._path, data)
        except OSError as error:
            raise disk_error(error, self._path) from error

    def _load(self) -> tuple[bytes, Head | None]:
        """The head that was seen last; a damaged file counts as none, or no head could ever replace it."""
        try:
            data = self._path.read_bytes()
            return data, open_head(data, self._run_key)
        except (OSError, IntegrityError, SignatureError):
            return b"", None


class HeadNews:
    """Listens for versions newer than `wanted` while that is fetched, and prices each of them once; used as a context.

    `cheapest_newer` is what the newest one would cost, infinite while there is none or its price is not known.
    """

    def __init__(
        self, watch: HeadWatch, counter: int, wanted: VersionEntry, price: Callable[[VersionEntry], float]
    ) -> None:
        self._watch = watch
        self._counter = counter
        self._wanted = wanted
        self._price = price
        self.cheapest_newer = math.inf
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="head news", daemon=True)

    def __enter__(self) -> "HeadNews":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()

    def _listen(self) -> None:
        while not self._done.is_set():
            try:
                head = self._watch.get(newer_than=self._counter, wait_s=MAX_LONG_POLL_S, deadline_s=MAX_LONG_POLL_S)
                if head.counter > self._counter and not self._done.is_set():
                    self.cheapest_newer = math.inf
                    if head.newest is not None and head.newest != self._wanted:
                        self.cheapest_newer = self._price(head.newest)
                    self._counter = head.counter
            except (ShoalError, OSError):
                # The fetch meets the same trouble and reports it.
                self._done.wait(POLL_PAUSE_S)


class ManifestCache:
    """Manifests on disk, fetched when missing; digest and signature are checked once, and the last few stay open.

    Opening one of a large model takes a second. Safe to use from several threads.
    """

    def __init__(self, store: ShardStore, sources: Sources, run_key: str, *, asked: Asked | None = None) -> None:
        """`asked` says which relays to ask, if not all."""
        self._asked = asked
        self._store = store
        self._sources = sources
        self._run_key = run_key
        self._open: dict[str, Manifest] = {}
        self._unsaved: dict[str, tuple[Manifest, bytes]] = {}

    def get(
        self, digest: str, *, deadline: Deadline, absent_after_s: float = ABSENT_AFTER_S, save: bool = True
    ) -> Manifest:
        """Without `save` a manifest that is not on disk stays in memory only."""
        if self._store.recover("manifests", digest):
            manifest = self._open.get(digest) or open_manifest(self._store.read("manifests", digest), self._run_key)
        else:
            manifest = self._fetch(digest, deadline, absent_after_s, save)
        self._open[digest] = manifest
        _forget_oldest(self._open)
        return manifest

    def _fetch(self, digest: str, deadline: Deadline, absent_after_s: float, save: bool) -> Manifest:
        """Bytes that a full disk refuses are kept for the next call."""
        manifest, data = self._unsaved.get(digest) or self._sources.manifest(
            digest, self._run_key, deadline=deadline, absent_after_s=absent_after_s, asked=self._asked
        )
        self._unsaved[digest] = manifest, data
        _forget_oldest(self._unsaved)
        if save:
            self._store.put("manifests", data, digest)
            self._unsaved.pop(digest, None)
        return manifest


def _forget_oldest(kept: dict[str, Any]) -> None:
    for old in list(kept)[:-MANIFESTS_OPEN]:
        kept.pop(old, None)
