"""An event clock: time jumps from one event to the next. Events of the same time happen in the order in which they were planned.

Most events of a large swarm are answers of one server, which come in the order of the questions. They stand in a line of their
own, and the next one happens at once if nothing is planned before it: cheaper than the heap of all others, in the same order.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable


class EventClock:
    def __init__(self, start: float = 1_000_000.0) -> None:
        self.now = start
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._line: deque[tuple[float, int, Callable[[], object]]] = deque()
        """Events in the order of their times."""
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
        """The same as the last act of an event, for one that is seldom earlier than the last one that was put here."""
        at, planned, line = self.now + seconds if seconds > 0.0 else self.now, self._events, self._line
        if line:
            if line[-1][0] > at:
                heapq.heappush(planned, (at, next(self._numbers), event))
            else:
                line.append((at, next(self._numbers), event))
        elif at > self._end or (planned and planned[0][0] <= at) or self._happened >= self._most or self._is_over():
            line.append((at, next(self._numbers), event))
        else:
            self.now = at
            self._happened += 1
            event()

    def run(self, is_over: Callable[[], bool], longest_s: float, most_events: float = math.inf) -> int:
        """Lets events happen until it is over, nothing is planned, or so much has passed; returns the number of events."""
        end = self.now + longest_s
        self._is_over, self._end, self._happened, self._most = is_over, end, 0, most_events
        planned, line, pop, pop_line = self._events, self._line, heapq.heappop, self._line.popleft
        while (planned or line) and not is_over() and self._happened < most_events:
            is_in_line = line and (not planned or line[0] < planned[0])
            if (line if is_in_line else planned)[0][0] > end:
                break
            self.now, _, event = pop_line() if is_in_line else pop(planned)
            self._happened += 1
            event()
        self._end = -math.inf
        return self._happened
