"""An event clock: time jumps from one event to the next. Events of the same time happen in the order in which they were planned.

Most events of a large swarm are answers of one server, which come in the order of the questions. They stand in a line of their
own, which is cheaper than the heap of all others and gives the same order.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable


class EventClock:
    def __init__(self, start: float = 1_000_000.0) -> None:
        self.now = start
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._line: deque[tuple[float, int, Callable[[], object]]] = deque()
        """Events in the order of their times."""
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now + max(0.0, seconds), next(self._numbers), event))

    def in_line(self, seconds: float, event: Callable[[], object]) -> None:
        """The same for an event that is seldom earlier than the last one that was put here."""
        at = self.now + max(0.0, seconds)
        if self._line and self._line[-1][0] > at:
            heapq.heappush(self._events, (at, next(self._numbers), event))
        else:
            self._line.append((at, next(self._numbers), event))

    def run(self, is_over: Callable[[], bool], longest_s: float, most_events: float = float("inf")) -> int:
        """Lets events happen until it is over, nothing is planned, or so much has passed; returns the number of events."""
        end, events = self.now + longest_s, 0
        planned, line, pop, pop_line = self._events, self._line, heapq.heappop, self._line.popleft
        while (planned or line) and not is_over() and events < most_events:
            is_in_line = line and (not planned or line[0] < planned[0])
            if (line if is_in_line else planned)[0][0] > end:
                break
            self.now, _, event = pop_line() if is_in_line else pop(planned)
            event()
            events += 1
        return events
