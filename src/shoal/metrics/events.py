"""The stream of events of a role: JSON lines in the order in which they happened, counters, and listeners.

A role makes one `EventLog` and one `Report` and passes them down; terminal, page, report and Prometheus read the same events.
Observation never stops the work: a full disk, a broken file or a failing listener loses events, and `events_lost` counts them.
An event log without a path only counts. `logging` is for tracebacks alone.
"""

import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, Any

Report = Callable[[str], None]
"""Takes one sentence for the operator of this process."""
Record = dict[str, Any]
"""One event: `at`, `event` and its fields."""

REPEAT_S = 10.0
"""Between two reports of the same trouble."""
WRITE_RETRY_S = 10.0
"""After a file could not be written."""
LOST = "events_lost"
READ_BYTES = 64 << 20
"""Of the end of a file that has grown without bounds."""

log = logging.getLogger(__name__)


def silent(text: str) -> None:
    """A Report that nobody reads."""


class EventLog:
    def __init__(self, path: Path | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self.counters: Counter[str] = Counter()
        self._path, self._clock = path, clock
        self._lock = threading.Lock()
        self._listeners: list[Callable[[Record], None]] = []
        self._file: IO[bytes] | None = None
        self._retry_at = -WRITE_RETRY_S
        self._is_torn = False

    @property
    def path(self) -> Path | None:
        return self._path

    def listen(self, heard: Callable[[Record], None]) -> None:
        """Calls back with every event, in the thread in which it happened; it must be quick."""
        self._listeners.append(heard)

    def count(self, name: str, amount: int | float = 1) -> None:
        with self._lock:
            self.counters[name] += amount  # type: ignore[assignment]  # Counter adds floats too

    def event(self, name: str, /, **fields: object) -> None:
        self.count(name)
        if self._path is None and not self._listeners:
            return
        record: Record = {"at": round(self._clock(), 3), "event": name, **fields}
        for heard in self._listeners:
            try:
                heard(record)
            except Exception:  # observation must not stop the work
                log.exception("a listener failed on the event %s", name)
        if self._path is not None:
            self._write(json.dumps(record, default=str).encode() + b"\n")

    def close(self) -> None:
        with self._lock:
            self._drop_file()
            self._path = None

    def _write(self, line: bytes) -> None:
        with self._lock:
            try:
                if self._open() is None:
                    raise OSError("the file could not be opened lately")
                assert self._file is not None
                data = b"\n" + line if self._is_torn else line
                self._is_torn = self._file.write(data) < len(data)
            except (OSError, ValueError):
                self.counters[LOST] += 1
                self._drop_file()
                return
            if self._is_torn:
                self.counters[LOST] += 1

    def _open(self) -> IO[bytes] | None:
        if self._file is None and self._path is not None and self._clock() - self._retry_at >= WRITE_RETRY_S:
            self._retry_at = self._clock()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        return self._file

    def _drop_file(self) -> None:
        if self._file is not None:
            self._retry_at = self._clock()
            self._file.close()
            self._file, self._is_torn = None, True


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


def read_events(path: Path, *, names: Collection[str] = (), newest: int = 10_000) -> list[Record]:
    """The newest events of a file, oldest first; lines that are no events are left out, and so is a file that is not there."""
    found: deque[Record] = deque(maxlen=newest)
    try:
        with path.open("rb") as lines:
            lines.seek(max(0, path.stat().st_size - READ_BYTES))
            for line in lines:  # the first one may be cut off, and is then left out
                record = _parsed(line)
                if record is not None and (not names or record["event"] in names):
                    found.append(record)
    except OSError:
        return list(found)
    return list(found)


def _parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_event = isinstance(record, dict) and isinstance(record.get("event"), str)
    return record if is_event and isinstance(record.get("at"), int | float) else None
