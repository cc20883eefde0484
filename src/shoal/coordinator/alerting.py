"""Turns alerts into events: one when an alert begins, one when it is over."""

from collections.abc import Sequence

from shoal.metrics import EventLog
from shoal.protocol.api import AlertView


class AlertWatch:
    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._raised: set[str] = set()

    def note(self, raised: Sequence[AlertView]) -> None:
        now = {one.name for one in raised}
        for one in raised:
            if one.name not in self._raised:
                self._events.event("alert", name=one.name, seen=one.seen, advice=one.advice)
        for name in sorted(self._raised - now):
            self._events.event("alert_over", name=name)
        self._raised = now
