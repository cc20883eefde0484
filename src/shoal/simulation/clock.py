"""An event clock: time jumps from one event to the next. Events of the same time happen in the order in which they were planned."""

import heapq
import itertools
from collections.abc import Callable


class EventClock:
    def __init__(self, start: float = 1_000_000.0) -> None:
        self.now = start
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now + max(0.0, seconds), next(self._numbers), event))

    def run(self, is_over: Callable[[], bool], longest_s: float, most_events: float = float("inf")) -> int:
        """Lets events happen until it is over, nothing is planned, or so much has passed; returns the number of events."""
        end, events = self.now + longest_s, 0
        planned, pop = self._events, heapq.heappop
        while planned and not is_over() and planned[0][0] <= end and events < most_events:
            self.now, _, event = pop(planned)
            event()
            events += 1
        return events
