"""Verified bytes from relays that nobody trusts.

Each call tries relays until one delivers bytes with the promised digest or signature, or the deadline passes; then the error
names what was wrong with each. A relay that delivers other bytes is reported and becomes the last resort; one that is slow, cut
off or does not have the bytes yet only loses weight in the choice. How slow a relay may be follows from the link: if all are too
slow, less is asked of them, until bytes arrive.
"""

import math
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TypeVar

from shoal.broadcast.http.pool import FetchError, HttpPool, Pace, check_url
from shoal.broadcast.manifest import MAX_MANIFEST_BYTES, Manifest, ShardEntry, open_manifest
from shoal.broadcast.scores import PeerScores, RelayReport
from shoal.broadcast.store import DiskError
from shoal.errors import ConfigError, IntegrityError, ShoalError, SignatureError, UnavailableError
from shoal.files import digest_bytes
from shoal.metrics import EventLog

ANSWER_WITHIN_S = 10.0
# What is asked of a relay at first, and of the slowest link.
USUAL_BYTES_S = 64 << 10
MIN_BYTES_S = 1 << 10
# A relay of ours holds a request for a shard that it expects soon; others ignore the parameter.
HOLD_S = 5.0
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)
# A relay may lag behind the one that announced a file; after this long no relay will ever have it.
ABSENT_AFTER_S = 15.0
NOT_THERE = (404, 410, 429, 503)

T = TypeVar("T")
Attempt = Callable[[str, float], T]
"""What to do with one relay before a deadline."""


class Deadline:
    """A moment that moves: `seconds` after the last progress, but never after `limit`. Safe to use from several threads."""

    def __init__(self, clock: Callable[[], float], seconds: float, limit: float = math.inf) -> None:
        self._clock = clock
        self._seconds = seconds
        self.limit = limit
        self._since = clock()

    def progress(self) -> None:
        self._since = self._clock()

    @property
    def moment(self) -> float:
        return min(self._since + self._seconds, self.limit)

    @property
    def left_s(self) -> float:
        return max(0.0, self.moment - self._clock())


@dataclass(frozen=True)
class Asked:
    """Whom to ask for a file."""

    urls: Callable[[], Sequence[str]]
    may_hold: Callable[[str], bool] = lambda url: True
    """Whether this relay may hold the request until the file is there; one that may wait for the file from us must not."""


class Sources:
    """Safe to use from several threads; `stop` ends every wait."""

    def __init__(
        self,
        relays: Callable[[], Sequence[str]],
        *,
        named: Collection[str] = (),
        metrics: EventLog | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        answer_within_s: float = ANSWER_WITHIN_S,
        max_bytes_s: float = 0,
    ) -> None:
        """`named` are relays that the owner or the operator vouches for; they are asked before strangers."""
        self._relays = relays
        self._metrics = metrics or EventLog()
        self._clock = clock
        self._pool = HttpPool(clock=clock, max_bytes_s=max_bytes_s)
        self._scores = PeerScores(named=[url.rstrip("/") for url in named], rng=rng, clock=clock)
        self._answer_within_s = answer_within_s
        self._min_bytes_s = float(USUAL_BYTES_S)
        # One buffer per thread: the page faults of a new one cost 1.8 ms per 2 MB, hashing it 0.7 ms.
        self._own = threading.local()
        self._stopped = threading.Event()

    def urls(self) -> list[str]:
        """The relays known now; an address that cannot be one is counted and left out."""
        usable: dict[str, None] = {}
        for url in self._relays():
            try:
                usable[check_url(url)] = None
            except ConfigError:
                self._metrics.count("relay_addresses_ignored")
        return list(usable)

    def alive(self, url: str) -> bool:
        return self._scores.alive(url)

    def answers(self, url: str) -> bool:
        return self._scores.answers(url)

    def choose(self, urls: Sequence[str], avoid: Collection[str] = ()) -> str | None:
        return self._scores.choose(urls, avoid)

    def reports(self) -> list[RelayReport]:
        return self._scores.reports()

    def stop(self) -> None:
        self._stopped.set()
        self._pool.close()

    def pause(self, seconds: float) -> bool:
        """Wait, unless stopped; True if stopped."""
        return self._stopped.wait(seconds)

    def fetch(self, url: str, path: str, *, max_bytes: int, deadline: float) -> bytes:
        """Unverified bytes from one relay; for use in an `Attempt` that verifies them."""
        return self._pool.fetch(url, path, max_bytes=max_bytes, pace=Pace(deadline))

    def shard(self, shard: ShardEntry, *, deadline: Deadline, asked: "Asked | None" = None) -> memoryview:
        """A verified shard from whichever relay has it; valid until this thread asks for the next one."""
        asked = asked or Asked(self.urls)

        def attempt(url: str, until: float) -> memoryview:
            pace = Pace(until, self._min_bytes_s, deadline.limit)
            return self._shard(url, shard, pace, HOLD_S if asked.may_hold(url) else 0)

        return self.try_each(_name(shard), attempt, deadline, size_bytes=shard.size_bytes, among=asked.urls)

    def shard_from(self, url: str, shard: ShardEntry) -> memoryview:
        """A verified shard from one relay; valid until this thread asks for the next one."""

        def attempt(url: str, until: float) -> memoryview:
            return self._shard(url, shard, Pace(until, self._min_bytes_s), HOLD_S)

        return self.ask(url, _name(shard), attempt, self._clock() + self._patience_s(shard.size_bytes))

    def file(self, digest: str, *, max_bytes: int, deadline: Deadline) -> bytes:
        return self._small("shards", digest, max_bytes, deadline)

    def manifest(
        self,
        digest: str,
        run_key: str,
        *,
        deadline: Deadline,
        absent_after_s: float = ABSENT_AFTER_S,
        asked: "Asked | None" = None,
    ) -> tuple[Manifest, bytes]:
        """A manifest and its served bytes. Its digest was signed, so a bad one is the publisher's fault."""
        data = self._small("manifests", digest, MAX_MANIFEST_BYTES, deadline, absent_after_s, asked)
        return open_manifest(data, run_key), data

    def ask(self, url: str, what: str, attempt: Attempt[T], deadline: float) -> T:
        """One attempt at one relay, whose score it changes; a result that is bytes counts as served."""
        started = self._clock()
        try:
            result = attempt(url, deadline)
        except ShoalError as error:
            self._record_error(url, what, error)
            raise
        size_bytes = len(result) if isinstance(result, (bytes, memoryview)) else 0
        seconds = max(self._clock() - started, 1e-6)
        self._scores.record_success(url, size_bytes, seconds)
        self._metrics.count("bytes_received", size_bytes)
        if size_bytes:
            self._min_bytes_s = min(USUAL_BYTES_S, max(self._min_bytes_s, size_bytes / seconds / 4))
        return result

    def try_each(
        self,
        what: str,
        attempt: Attempt[T],
        deadline: Deadline,
        *,
        size_bytes: int = 0,
        absent_after_s: float = ABSENT_AFTER_S,
        among: Callable[[], Sequence[str]] | None = None,
    ) -> T:
        """The first success over all relays, round after round.

        Ends early when all relays have kept answering for `absent_after_s` that they know of no such thing.
        """
        started = absent_since = self._clock()
        reasons: dict[str, str] = {}
        for pause_s in chain(PAUSES_S, repeat(PAUSES_S[-1])):
            errors: dict[str, ShoalError] = {}
            for url in self._round(among or self.urls, deadline):
                try:
                    until = min(deadline.moment, self._clock() + self._patience_s(size_bytes))
                    result = self.ask(url, what, attempt, until)
                    deadline.progress()
                    return result
                except ShoalError as error:
                    errors[url] = error
            if self._ask_less(errors.values()):
                deadline.progress()
            # A last try that our own deadline cut short says less than what the relay did before.
            reasons |= {
                url: str(error) for url, error in errors.items() if url not in reasons or not _is_timeout(error)
            }
            now = self._clock()
            if not errors or not all(_is_absent(error) for error in errors.values()):
                absent_since = now
            elif now - absent_since >= absent_after_s:
                break
            if now + pause_s >= deadline.moment or self.pause(pause_s):
                break
        raise self._nobody(what, self._clock() - started, reasons)

    def _patience_s(self, size_bytes: int) -> float:
        """Until an answer must have begun to arrive: a busy relay may let a request wait for its turn."""
        return self._answer_within_s + size_bytes / self._min_bytes_s

    def _ask_less(self, errors: Collection[ShoalError]) -> bool:
        """Wait for slower relays if none was fast enough: then the link of this node is slow. Whether that was possible."""
        slow = any(isinstance(error, FetchError) and error.reason == "slow" for error in errors)
        if not slow or self._min_bytes_s <= MIN_BYTES_S:
            return False
        self._min_bytes_s = max(MIN_BYTES_S, self._min_bytes_s / 2)
        return True

    def _round(self, urls: Callable[[], Sequence[str]], deadline: Deadline) -> Iterator[str]:
        """Each relay once, in sampled order, while there is time."""
        tried: set[str] = set()
        while self._clock() < deadline.moment and not self._stopped.is_set():
            url = self.choose(urls(), avoid=tried)
            if url is None:
                return
            tried.add(url)
            yield url

    def _record_error(self, url: str, what: str, error: ShoalError) -> None:
        """Remember what a relay did: a lie if its bytes are wrong, a failure if they did not come, nothing if not yet.

        A connection that broke because this side stops is no relay's fault.
        """
        if self._stopped.is_set():
            return
        if isinstance(error, (IntegrityError, SignatureError)):
            self._scores.record_lie(url, str(error))
            self._metrics.count("lies")
            self._metrics.event("relay_lied", relay=url, about=what, reason=str(error))
        elif not isinstance(error, DiskError) and not (isinstance(error, FetchError) and error.status in NOT_THERE):
            self._scores.record_failure(url, str(error))
            self._metrics.event("relay_failed", relay=url, about=what, reason=str(error))

    def _shard(self, url: str, shard: ShardEntry, pace: Pace, hold_s: float) -> memoryview:
        if len(getattr(self._own, "buffer", b"")) < shard.size_bytes:
            self._own.buffer = memoryview(bytearray(shard.size_bytes))
        buffer: memoryview = self._own.buffer[: shard.size_bytes]
        self._pool.fetch_into(url, f"/shards/{shard.digest}?wait_s={hold_s:g}", buffer, pace=pace)
        _check_digest(buffer, shard.digest)
        self._metrics.count("shards_verified")
        return buffer

    def _small(
        self,
        folder: str,
        digest: str,
        max_bytes: int,
        deadline: Deadline,
        absent_after_s: float = ABSENT_AFTER_S,
        asked: "Asked | None" = None,
    ) -> bytes:
        asked = asked or Asked(self.urls)

        def attempt(url: str, until: float) -> bytes:
            pace = Pace(until, self._min_bytes_s, deadline.limit)
            hold_s = min(HOLD_S, absent_after_s) if asked.may_hold(url) else 0
            data = self._pool.fetch(url, f"/{folder}/{digest}?wait_s={hold_s:g}", max_bytes=max_bytes, pace=pace)
            _check_digest(data, digest)
            return data

        what = f"{folder}/{digest[:12]}…"
        return self.try_each(what, attempt, deadline, absent_after_s=absent_after_s, among=asked.urls)

    def _nobody(self, what: str, seconds: float, reasons: dict[str, str]) -> UnavailableError:
        if self._stopped.is_set():
            return UnavailableError(f"Stopped while waiting for {what}.")
        known = {report.url: report.last_error for report in self.reports()}
        reasons = reasons or {url: known.get(url) or "not asked before the time was over" for url in self.urls()}
        if not reasons:
            return UnavailableError(
                f"No relay is known to fetch {what} from.", hint="Name one, or ask the coordinator."
            )
        listed = "; ".join(f"{url}: {reason}" for url, reason in list(reasons.items())[:8])
        return UnavailableError(f"No relay delivered {what} within {seconds:.1f} s ({listed}).")


def _name(shard: ShardEntry) -> str:
    return f"shard {shard.digest[:12]}…"


def _is_absent(error: ShoalError) -> bool:
    return isinstance(error, FetchError) and error.status == 404


def _is_timeout(error: ShoalError) -> bool:
    return isinstance(error, FetchError) and error.reason == "timeout"


def _check_digest(data: bytes | memoryview, digest: str) -> None:
    found = digest_bytes(data)
    if found != digest:
        raise IntegrityError(f"bytes with digest {found[:12]}… instead of {digest[:12]}…")
