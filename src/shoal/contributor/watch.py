"""Follows the limits and wishes of a contributor while a worker runs: whether it rests now, why, and how long its grace lasts.

`look` is called often and asks seldom: the control file a few times a second, the machine every few seconds. Every change is said
once. Clock and conditions are injected.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace

from shoal.contributor.control import Control, Wish, WorkerStatus
from shoal.contributor.limits import Conditions, Limits, Rest, memory_excess, reason_to_rest
from shoal.errors import ShoalError
from shoal.metrics import Report
from shoal.metrics.units import size

WISH_EVERY_S = 0.25
CONDITIONS_EVERY_S = 5.0
TELL_EVERY_S = 1.0
WAIT_S = 1.0


class MemoryLimitError(ShoalError):
    """The worker holds more memory than its contributor allows."""

    code = "memory_limit"
    permanent = True


class LimitWatch:
    def __init__(
        self,
        limits: Limits,
        control: Control,
        conditions: Callable[[Limits], Conditions],
        report: Report,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.rest: Rest | None = None
        self.wish: Wish = "work"
        self._control, self._conditions, self._report, self._clock = control, conditions, report, clock
        self._seen = Conditions()
        self._wish_at = self._conditions_at = self._tell_at = float("-inf")
        self._rests_since = 0.0
        self._written: WorkerStatus | None = None

    @property
    def is_resting(self) -> bool:
        return self.rest is not None

    @property
    def is_grace_over(self) -> bool:
        """Whether what was begun before the rest goes back now."""
        return self.rest is not None and self._clock() - self._rests_since >= self.rest.grace_s

    @property
    def is_finishing(self) -> bool:
        return self.wish == "finish"

    def look(self) -> None:
        """MemoryLimitError if the process holds more than it may."""
        now = self._clock()
        if now - self._wish_at >= WISH_EVERY_S:
            self._wish_at, self.wish = now, self._control.wish()
        if now - self._conditions_at >= CONDITIONS_EVERY_S:
            self._conditions_at, self._seen = now, self._conditions(self.limits)
            self._check_memory()
        rest = reason_to_rest(self.limits, self._seen, is_paused=self.wish == "pause")
        if not self.is_finishing and (rest and rest.reason) != (self.rest and self.rest.reason):
            self._change(rest)

    def tell(self, status: WorkerStatus) -> None:
        """Writes what the worker does, at most once a second unless its state or its wish has changed."""
        state = "finishing" if self.is_finishing else "resting" if self.rest else status.state
        status = replace(
            status,
            pid=os.getpid(),
            state=state,
            reason=self.rest.reason if self.rest else "",
            heard=self.wish,
        )
        is_news = self._written is None or (status.state, status.heard) != (self._written.state, self._written.heard)
        if is_news or (status != self._written and self._clock() - self._tell_at >= TELL_EVERY_S):
            self._written, self._tell_at = status, self._clock()
            self._control.tell(status)

    def wait(self, activity: str, *, sleep: Callable[[float], None] = time.sleep) -> bool:
        """Returns when work is allowed (True) or the contributor wants it to end (False). For when nothing is held."""
        while True:
            self.look()
            self.tell(WorkerStatus(activity=activity))
            if self.is_finishing or not self.is_resting:
                return not self.is_finishing
            sleep(WAIT_S)

    def sleep(self, seconds: float, *, activity: str = "waiting", sleep: Callable[[float], None] = time.sleep) -> None:
        """Passes the time and goes on listening; leaves if the contributor wants that."""
        until = self._clock() + seconds
        while (left_s := until - self._clock()) > 0:
            self.look()
            self.tell(WorkerStatus(activity=activity))
            if self.is_finishing:
                raise SystemExit(0)
            sleep(min(left_s, WAIT_S))

    def _change(self, rest: Rest | None) -> None:
        before, self.rest, self._rests_since = self.rest, rest, self._clock()
        if rest is not None:
            self._report(f"resting: {rest.reason}")
        elif before is not None:
            self._report("working again")

    def _check_memory(self) -> None:
        if excess := memory_excess(self.limits, self._seen):
            raise MemoryLimitError(
                f"This worker holds {size(excess)} more than the {size(self.limits.memory_bytes)} of"
                " --memory; its slots go back.",
                hint="Allow more, or join a run with a smaller policy.",
            )
