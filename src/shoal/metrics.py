"""What a process says about its work: counters and events for programs, sentences for its operator.

A role makes one `EventLog` and one `Report` and passes them down. Events are JSON lines in the order in which they happened;
an event log without a path only counts. `logging` is for tracebacks alone.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO

Report = Callable[[str], None]
"""Takes one sentence for the operator of this process."""

REPEAT_S = 10.0
"""Between two reports of the same trouble."""


def silent(text: str) -> None:
    """A Report that nobody reads."""


class EventLog:
    def __init__(self, path: Path | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self.counters: Counter[str] = Counter()
        self._clock = clock
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", buffering=1)

    def count(self, name: str, amount: int | float = 1) -> None:
        with self._lock:
            self.counters[name] += amount  # type: ignore[assignment]  # Counter adds floats too

    def event(self, name: str, /, **fields: object) -> None:
        self.count(name)
        if self._file is not None:
            line = json.dumps({"at": round(self._clock(), 3), "event": name, **fields})
            with self._lock:
                self._file.write(line + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class ReportingEventLog(EventLog):
    """Also reports trouble to the operator: at once, and again while it lasts."""

    def __init__(
        self,
        path: Path,
        report: Report,
        *,
        reported: Collection[str] = ("trouble", "relay_failed", "relay_lied"),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(path)
        self._report, self._reported, self._monotonic = report, reported, monotonic
        self._reported_at: dict[object, float] = {}

    def event(self, name: str, /, **fields: object) -> None:
        super().event(name, **fields)
        if name in self._reported:
            reason, relay = str(fields.get("reason", "")), fields.get("relay")
            now = self._monotonic()
            self._reported_at = {what: at for what, at in self._reported_at.items() if now - at < REPEAT_S}
            what = (name, relay or reason)
            if what not in self._reported_at:
                self._reported_at[what] = now
                self._report(f"{relay} lied and is avoided: {reason}" if name == "relay_lied" else reason)
