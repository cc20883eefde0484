"""Verified bytes from relays that nobody trusts.

Each call tries relays until one delivers bytes with the promised digest or signature, or the deadline passes; then the error
says what was wrong with each. A relay that delivers other bytes is named as a liar and shunned; one that is slow, cut off or
not there yet only loses weight in the draw.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import TypeVar

from shoal.broadcast.book import RelayBook, RelayReport
from shoal.broadcast.http.pool import FetchError, HttpPool, check_url
from shoal.broadcast.manifest import MAX_MANIFEST_BYTES, Manifest, ShardEntry, open_manifest
from shoal.errors import ConfigError, IntegrityError, ShoalError, SignatureError, UnavailableError
from shoal.files import digest_bytes
from shoal.metrics import EventLog

PATIENCE_S = 10.0
LEAST_BYTES_S = 64 << 10
# A relay of ours holds a request for a shard that it expects soon; others ignore the parameter.
HOLD_S = 5.0
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)
# A relay may lag behind the one that told us; after this long nobody will ever have the file.
ABSENT_AFTER_S = 15.0
NOT_THERE = (404, 410, 429, 503)

T = TypeVar("T")


class Sources:
    """Safe to use from several threads; `stop` ends every wait."""

    def __init__(
        self,
        relays: Callable[[], Sequence[str]],
        *,
        metrics: EventLog | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        patience_s: float = PATIENCE_S,
        least_bytes_s: float = LEAST_BYTES_S,
        max_bytes_s: float = 0,
    ) -> None:
        self._relays = relays
        self.metrics = metrics or EventLog()
        self.clock = clock
        self.pool = HttpPool(clock=clock, max_bytes_s=max_bytes_s)
        self.book = RelayBook(rng=rng, clock=clock)
        self._patience_s = patience_s
        self._least_bytes_s = least_bytes_s
        self._stopped = threading.Event()

    def urls(self) -> list[str]:
        """The relays known now; an address that cannot be one is counted and left out."""
        usable: dict[str, None] = {}
        for url in self._relays():
            try:
                usable[check_url(url)] = None
            except ConfigError:
                self.metrics.count("relay_addresses_ignored")
        return list(usable)

    def reports(self) -> list[RelayReport]:
        return self.book.reports()

    def stop(self) -> None:
        self._stopped.set()
        self.pool.close()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def pause(self, seconds: float) -> bool:
        """Wait, unless stopped; True if stopped."""
        return self._stopped.wait(seconds)

    def shard(
        self, shard: ShardEntry, *, deadline: float, among: Callable[[], Sequence[str]] | None = None
    ) -> memoryview:
        """A verified shard from whichever relay has it."""

        def attempt(url: str, until: float) -> memoryview:
            return self._shard(url, shard, until)

        what = f"shard {shard.digest[:12]}…"
        return self.try_each(what, attempt, deadline, size_bytes=shard.size_bytes, among=among)

    def shard_from(self, url: str, shard: ShardEntry) -> memoryview:
        """A verified shard from one relay, which is blamed if it fails."""
        started = self.clock()
        try:
            data = self._shard(url, shard, started + self._patience(shard.size_bytes))
        except ShoalError as error:
            self.blame(url, f"shard {shard.digest[:12]}…", error)
            raise
        self._delivered(url, shard.size_bytes, self.clock() - started)
        return data

    def file(self, digest: str, *, max_bytes: int, deadline: float) -> bytes:
        return self._small("shards", digest, max_bytes, deadline)

    def manifest(
        self,
        digest: str,
        run_key: str,
        *,
        deadline: float,
        absent_after_s: float = ABSENT_AFTER_S,
        among: Callable[[], Sequence[str]] | None = None,
    ) -> tuple[Manifest, bytes]:
        """A manifest and its served bytes. Its digest was signed for, so a bad one is the publisher's fault."""
        data = self._small("manifests", digest, MAX_MANIFEST_BYTES, deadline, absent_after_s, among)
        return open_manifest(data, run_key), data

    def try_each(
        self,
        what: str,
        attempt: Callable[[str, float], T],
        deadline: float,
        *,
        size_bytes: int = 0,
        absent_after_s: float = ABSENT_AFTER_S,
        among: Callable[[], Sequence[str]] | None = None,
    ) -> T:
        """The first success of `attempt(relay, deadline of this try)` over relays in drawn order, round after round.

        Gives up early when all relays have kept saying for `absent_after_s` that they know of no such thing.
        """
        started = self.clock()
        reasons: dict[str, str] = {}
        absent_since: float | None = None
        for pause_s in chain(PAUSES_S, repeat(PAUSES_S[-1])):
            tried: set[str] = set()
            absent = 0
            while (url := self.book.choose((among or self.urls)(), avoid=tried)) is not None:
                now = self.clock()
                if now >= deadline or self.stopped:
                    break
                tried.add(url)
                try:
                    result = attempt(url, min(deadline, now + self._patience(size_bytes)))
                    self._delivered(url, size_bytes, self.clock() - now)
                    return result
                except ShoalError as error:
                    reasons[url] = str(error)
                    absent += isinstance(error, FetchError) and error.status == 404
                    self.blame(url, what, error)
            if not tried and not reasons:
                reasons = {report.url: report.last_error for report in self.reports() if report.lies}
            now = self.clock()
            absent_since = (absent_since or now) if tried and absent == len(tried) else None
            if absent_since is not None and now - absent_since >= absent_after_s:
                break
            if now + pause_s >= deadline or self.pause(pause_s):
                break
        raise self._nobody(what, self.clock() - started, reasons)

    def blame(self, url: str, what: str, error: ShoalError) -> None:
        """Remember what a relay did: a lie if its bytes are wrong, a failure if they did not come, nothing if not yet."""
        if isinstance(error, (IntegrityError, SignatureError)):
            self.book.record_lie(url, str(error))
            self.metrics.count("lies")
            self.metrics.event("relay_lied", relay=url, about=what, reason=str(error))
        elif not (isinstance(error, FetchError) and error.status in NOT_THERE):
            self.book.record_failure(url, str(error))
            self.metrics.event("relay_failed", relay=url, about=what, reason=str(error))

    def _shard(self, url: str, shard: ShardEntry, deadline: float) -> memoryview:
        buffer = memoryview(bytearray(shard.size_bytes))
        self.pool.fetch_into(url, f"/shards/{shard.digest}?wait_s={HOLD_S:g}", buffer, deadline=deadline)
        self._check_digest(buffer, shard.digest)
        self.metrics.count("shards_verified")
        return buffer

    def _patience(self, size_bytes: int) -> float:
        return self._patience_s + size_bytes / self._least_bytes_s

    def _small(
        self,
        folder: str,
        digest: str,
        max_bytes: int,
        deadline: float,
        absent_after_s: float = ABSENT_AFTER_S,
        among: Callable[[], Sequence[str]] | None = None,
    ) -> bytes:
        def attempt(url: str, until: float) -> bytes:
            hold_s = min(HOLD_S, absent_after_s)
            data = self.pool.fetch(url, f"/{folder}/{digest}?wait_s={hold_s:g}", max_bytes=max_bytes, deadline=until)
            self._check_digest(data, digest)
            self.metrics.count("bytes_received", len(data))
            return data

        what = f"{folder}/{digest[:12]}…"
        return self.try_each(what, attempt, deadline, absent_after_s=absent_after_s, among=among)

    def _delivered(self, url: str, size_bytes: int, seconds: float) -> None:
        self.book.record_success(url, size_bytes, seconds)
        self.metrics.count("bytes_received", size_bytes)

    def _check_digest(self, data: bytes | memoryview, digest: str) -> None:
        found = digest_bytes(data)
        if found != digest:
            raise IntegrityError(f"bytes with digest {found[:12]}… instead of {digest[:12]}…")

    def _nobody(self, what: str, seconds: float, reasons: dict[str, str]) -> UnavailableError:
        if self.stopped:
            return UnavailableError(f"Stopped while waiting for {what}.")
        reasons = reasons or dict.fromkeys(self.urls(), "not asked before the time was over")
        if not reasons:
            return UnavailableError(
                f"No relay is known to fetch {what} from.", hint="Name one, or ask the coordinator."
            )
        told = "; ".join(f"{url}: {reason}" for url, reason in list(reasons.items())[:8])
        return UnavailableError(f"No relay delivered {what} within {seconds:.1f} s ({told}).")
