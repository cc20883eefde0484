"""An event clock: time jumps from one event to the next. Events of the same time happen in the order in which they were planned.

Most events of a large swarm come nearly in the order in which they are planned: answers of one server, and requests that idle
workers repeat after the same wait. They wait in lines, each in the order of time, which is cheaper than the heap of all others
and gives the same order: the next event is the first of the heads.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable

Event = tuple[float, int, Callable[[], object]]
LINES = 4
"""One for answers, and one for each of the few waits that idle workers hear at a time."""


class EventClock:
    def __init__(self, start: float = 1_000_000.0) -> None:
        self.now = start
        self._events: list[Event] = []
        self._lines: tuple[deque[Event], ...] = tuple(deque() for _ in range(LINES))
        self._numbers = itertools.count()
        self._is_over: Callable[[], bool] = lambda: True
        self._end, self._happened, self._most = -math.inf, 0, 0.0
        """Of the last `run`."""

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, event: Callable[[], object]) -> None:
        at = self.now + seconds if seconds > 0.0 else self.now
        heapq.heappush(self._events, (at, next(self._numbers), event))

    def in_line(self, seconds: float, event: Callable[[], object]) -> None:
        """The same, for an event that is seldom earlier than the last ones that were put here."""
        self._put_in_line(self.now + seconds if seconds > 0.0 else self.now, event)

    def _put_in_line(self, at: float, event: Callable[[], object]) -> None:
        for line in self._lines:
            if not line or line[-1][0] <= at:
                line.append((at, next(self._numbers), event))
                return
        heapq.heappush(self._events, (at, next(self._numbers), event))

    def finally_after(self, seconds: float, event: Callable[[], object]) -> None:
        """The same as the last act of an event: the next one happens at once if nothing is planned before it."""
        at = self.now + seconds if seconds > 0.0 else self.now
        is_next = at <= self._end and (not self._events or self._events[0][0] > at)
        for line in self._lines:
            if line and line[0][0] <= at:
                is_next = False
        if is_next and self._happened < self._most and not self._is_over():
            self.now = at
            self._happened += 1
            event()
        else:
            self._put_in_line(at, event)

    def run(self, is_over: Callable[[], bool], longest_s: float, most_events: float = math.inf) -> int:
        """Lets events happen until it is over, nothing is planned, or so much has passed; returns the number of events."""
        end, planned, lines = self.now + longest_s, self._events, self._lines
        self._is_over, self._end, self._happened, self._most = is_over, end, 0, most_events
        while not is_over() and self._happened < most_events:
            first: Event | None = planned[0] if planned else None
            source: deque[Event] | None = None
            for line in lines:
                if line and (first is None or line[0] < first):
                    first, source = line[0], line
            if first is None or first[0] > end:
                break
            if source is None:
                heapq.heappop(planned)
            else:
                source.popleft()
            self.now = first[0]
            self._happened += 1
            first[2]()
        self._end = -math.inf
        return self._happened
