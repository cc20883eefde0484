"""How well each relay has served, and which one to ask next.

A relay is sampled with weight success × bandwidth (moving averages). Sampling beats greedy choice, which sends every client to
the same relay. Every record raises all success rates a little, so that a relay that recovered is tried again. Relays that have
served, and those that the owner names, share the choices with strangers, which are tried the less often the more of them failed:
any number of addresses that answer nothing costs little. One that failed rests for a moment; one that sent wrong bytes is the last
resort for a long time, but no worse, since all bytes are verified.
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
REST_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0, 120.0)
# One that has never served loses its place for longer.
STRANGER_REST_S = (60.0, 120.0, 300.0, 600.0, 1800.0)
# One that serves less than half of what it is asked for is not relied on.
RELIABLE_SUCCESS = 0.5
STRANGERS_SHARE = 0.5
"""Of the choices, while no stranger has failed and a relay that served is at hand."""


@dataclass
class RelayReport:
    url: str
    success: float = 1.0
    bandwidth_bytes_s: float | None = None
    served: int = 0
    failures: int = 0
    lies: int = 0
    bytes_received: int = 0
    failures_in_a_row: int = 0
    last_error: str = ""
    avoided_until: float = float("-inf")
    resting_until: float = float("-inf")


class PeerScores:
    """Safe to use from several threads."""

    def __init__(
        self,
        *,
        named: Collection[str] = (),
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`named` are relays that the owner or the operator vouches for."""
        self._named = frozenset(named)
        self._rng = rng or random.Random()
        self._clock = clock
        self._lock = threading.Lock()
        self._reports: dict[str, RelayReport] = {}

    def choose(self, urls: Sequence[str], avoid: Collection[str] = ()) -> str | None:
        """One of the relays; None when all of them are in `avoid`."""
        with self._lock:
            tiers: list[list[RelayReport]] = [[], [], [], []]
            for url in dict.fromkeys(urls):
                if url not in avoid:
                    report = self._report(url)
                    tiers[self._tier(report)].append(report)
            served, strangers, resting, liars = tiers
            if strangers and self._rng.random() < STRANGERS_SHARE / (1 + self._failed_strangers()):
                served = []
            usable = served or strangers or resting or liars
            weights = [report.success * self._bandwidth(report) for report in usable]
            return self._rng.choices(usable, weights)[0].url if usable else None

    def alive(self, url: str) -> bool:
        """Neither avoided for wrong bytes nor resting after a failure, and no more failures than successes lately."""
        with self._lock:
            report = self._reports.get(url)
            return report is None or (self._tier(report) < 2 and report.success >= RELIABLE_SUCCESS)

    def answers(self, url: str) -> bool:
        """Its last answer was good, whatever came before it."""
        with self._lock:
            report = self._reports.get(url)
            return report is not None and self._tier(report) < 2 and report.served > 0

    def record_success(self, url: str, size_bytes: int, seconds: float) -> None:
        with self._lock:
            report = self._update(url, 1.0)
            report.served += 1
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
            rests_s = REST_S if self._is_known(report) else STRANGER_REST_S
            rest_s = rests_s[min(report.failures_in_a_row, len(rests_s) - 1)]
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

    def _tier(self, report: RelayReport) -> int:
        now = self._clock()
        if report.avoided_until > now:
            return 3
        if report.resting_until > now:
            return 2
        return 0 if self._is_known(report) else 1

    def _is_known(self, report: RelayReport) -> bool:
        return bool(report.bytes_received) or report.url in self._named

    def _failed_strangers(self) -> int:
        return sum(report.failures + report.lies > 0 and not report.bytes_received for report in self._reports.values())

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
