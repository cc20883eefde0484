"""How well each relay has served, and which one to ask next.

A relay is sampled with weight success × bandwidth (moving averages). Sampling beats greedy choice, which sends every client to
the same relay. Every record raises all success rates a little, so that a relay that recovered is tried again; one that sent
wrong bytes is avoided for a long time.
"""

import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

SMOOTHING = 0.3
RECOVERY = 0.01
MIN_SUCCESS = 0.001
# Smaller answers measure latency, not bandwidth.
BANDWIDTH_SAMPLE_BYTES = 64 << 10
AVOID_LIAR_S = 600.0
# One that does not answer is not asked for a moment, longer each time.
REST_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)


@dataclass
class RelayReport:
    url: str
    success: float = 1.0
    bandwidth_bytes_s: float | None = None
    failures: int = 0
    lies: int = 0
    bytes_received: int = 0
    failures_in_a_row: int = 0
    last_error: str = ""
    avoided_until: float = float("-inf")
    resting_until: float = float("-inf")


class PeerScores:
    """Safe to use from several threads."""

    def __init__(self, *, rng: random.Random | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rng = rng or random.Random()
        self._clock = clock
        self._lock = threading.Lock()
        self._reports: dict[str, RelayReport] = {}

    def choose(self, urls: Sequence[str], avoid: Collection[str] = ()) -> str | None:
        """One of the relays, or None when all of them are in `avoid` or sent wrong bytes lately."""
        with self._lock:
            now = self._clock()
            known = [self._report(url) for url in dict.fromkeys(urls) if url not in avoid]
            usable = [report for report in known if report.avoided_until <= now]
            usable = [report for report in usable if report.resting_until <= now] or usable
            if not usable:
                return None
            weights = [report.success * self._bandwidth(report) for report in usable]
            return self._rng.choices(usable, weights)[0].url

    def alive(self, url: str) -> bool:
        """Neither avoided for wrong bytes nor resting after a failure."""
        with self._lock:
            report = self._reports.get(url)
            return report is None or max(report.avoided_until, report.resting_until) <= self._clock()

    def record_success(self, url: str, size_bytes: int, seconds: float) -> None:
        with self._lock:
            report = self._update(url, 1.0)
            report.failures_in_a_row = 0
            report.resting_until = float("-inf")
            report.bytes_received += size_bytes
            if size_bytes >= BANDWIDTH_SAMPLE_BYTES:
                speed = size_bytes / max(seconds, 1e-6)
                known = report.bandwidth_bytes_s
                report.bandwidth_bytes_s = speed if known is None else known + SMOOTHING * (speed - known)

    def record_failure(self, url: str, why: str) -> None:
        with self._lock:
            report = self._update(url, 0.0)
            report.failures += 1
            report.last_error = why
            rest_s = REST_S[min(report.failures_in_a_row, len(REST_S) - 1)]
            report.failures_in_a_row += 1
            report.resting_until = self._clock() + rest_s

    def record_lie(self, url: str, what: str) -> None:
        with self._lock:
            report = self._update(url, 0.0)
            report.lies += 1
            report.last_error = what
            report.avoided_until = self._clock() + AVOID_LIAR_S

    def reports(self) -> list[RelayReport]:
        with self._lock:
            return [replace(report) for report in self._reports.values()]

    def _update(self, url: str, outcome: float) -> RelayReport:
        for report in self._reports.values():
            report.success = min(1.0, report.success + RECOVERY)
        report = self._report(url)
        report.success = max(MIN_SUCCESS, report.success + SMOOTHING * (outcome - report.success))
        return report

    def _report(self, url: str) -> RelayReport:
        return self._reports.setdefault(url, RelayReport(url))

    def _bandwidth(self, report: RelayReport) -> float:
        if report.bandwidth_bytes_s is not None:
            return max(report.bandwidth_bytes_s, 1.0)
        known = [other.bandwidth_bytes_s for other in self._reports.values() if other.bandwidth_bytes_s is not None]
        return max(sum(known) / len(known), 1.0) if known else 1.0
