"""How long a client waits for a coordinator that is away, and what it says meanwhile.

A coordinator may be restarting, the network may be down, or this laptop was asleep: calls are repeated, with growing pauses, until
their deadline. All calls of a client share one `Waiting`, so that an outage is reported in one sentence, however many threads
wait for its end.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.errors import UnavailableError
from shoal.metrics import Report, silent

FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 3.0
REPORTED_AFTER_S = 5.0
"""Shorter waits are part of every restart."""
REPORTED_DEADLINE_S = 60.0
"""Calls with a shorter deadline end before a sentence about them would help."""


@dataclass
class Waiting:
    """What the calls of one client have in common."""

    on_wait: Report = silent
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    limit_s: float = float("inf")
    limited_at: float = 0.0
    is_reported: bool = field(default=False, init=False)

    def limit(self, limit_s: float) -> None:
        """From now on no call waits longer than this, whatever its deadline."""
        self.limit_s, self.limited_at = limit_s, self.monotonic()

    def start(self, deadline_s: float) -> "Wait":
        return Wait(self, deadline_s, self.monotonic())

    def report(self, sentence: str) -> None:
        if not self.is_reported:
            self.is_reported = True
            self.on_wait(sentence)


@dataclass
class Wait:
    """One call, from its first try to its answer."""

    waiting: Waiting
    deadline_s: float
    started_at: float
    has_failed: bool = False
    backoff_s: float = FIRST_BACKOFF_S

    def left_s(self) -> float:
        return self._ends_at() - self.waiting.monotonic()

    def pause(self, who: str, problem: str, retry_after_s: float | None = None) -> None:
        """Sleeps before the next try, or ends the wait with an error that names whom it waited for."""
        pause_s = self.backoff_s * random.uniform(0.5, 1.0)
        if retry_after_s is not None:
            pause_s = max(pause_s, retry_after_s * random.uniform(1.0, 1.25))
        if self.left_s() < max(pause_s, self.backoff_s):
            allowed_s = self._ends_at() - self.started_at
            raise UnavailableError(
                f"{who[0].upper()}{who[1:]} did not answer for {allowed_s:.0f} s ({problem}).",
                hint="Check the address and that it is running; this command can simply be started again.",
            )
        self.has_failed = True
        waited_s = self.waiting.monotonic() - self.started_at
        if waited_s >= REPORTED_AFTER_S and self.deadline_s >= REPORTED_DEADLINE_S:
            self.waiting.report(f"Waiting for {who}, for up to {_duration(self.deadline_s)}: {problem}.")
        self.waiting.sleep(pause_s)
        self.backoff_s = min(self.backoff_s * 2, LAST_BACKOFF_S)

    def end(self) -> None:
        """The call is answered: the next outage is reported again. Calls that never waited know nothing about the outage."""
        if self.has_failed:
            self.waiting.is_reported = False

    def _ends_at(self) -> float:
        limited_from = max(self.started_at, self.waiting.limited_at)
        return min(self.started_at + self.deadline_s, limited_from + self.waiting.limit_s)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
