"""An event clock: time jumps from one event to the next. Events of the same time happen in the order in which they were planned.

A crowd is a second source of events, in the same order: thousands of machines that do the same again and again are cheaper
to play together than as events of a heap.
"""

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Protocol

Event = tuple[float, int, Callable[[], object]]


class Crowd(Protocol):
    def play(self, first: Event | None, end: float, most: float) -> int:
        """Lets the events of the crowd happen that come before the first of the others and not after the end.

        Returns how many, none if there is none. It may stop earlier, and does if it has planned another event.
        """
        ...


class EventClock:
    def __init__(self, start: float = 1_000_000.0) -> None:
        self.now = start
        self.crowd: Crowd | None = None
        self._events: list[Event] = []
        self.number: Callable[[], int] = itertools.count().__next__
        """Of the next event that is planned; those of the crowd are numbered with the others."""

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, event: Callable[[], object]) -> None:
        self.at(self.now + seconds if seconds > 0.0 else self.now, event)

    def at(self, time: float, event: Callable[[], object]) -> None:
        """At a time that is not over."""
        heapq.heappush(self._events, (time, self.number(), event))

    def run(self, is_over: Callable[[], bool], longest_s: float, most_events: float = math.inf) -> int:
        """Lets events happen until it is over, nothing is planned, or so much has passed; returns the number of events."""
        end, planned, crowd, happened = self.now + longest_s, self._events, self.crowd, 0
        while not is_over() and happened < most_events:
            first = planned[0] if planned else None
            played = crowd.play(first, end, most_events - happened) if crowd is not None else 0
            happened += played
            if played:
                continue
            if first is None or first[0] > end:
                break
            heapq.heappop(planned)
            self.now = first[0]
            happened += 1
            first[2]()
        return happened
