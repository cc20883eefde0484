"""Shows a run while it goes on: the live picture in a terminal, plain lines elsewhere.

The owner of the loop calls `update` with what the coordinator answered and `note` with what happened on the host; nothing here
waits, polls or starts threads. Without a terminal one ASCII line appears on every change and at least every few seconds.
"""

import io
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live

from shoal.files import write_atomic
from shoal.observe import series
from shoal.observe.view import Happening, Tone, ViewExtra, alert_lines, happenings, render
from shoal.observe.words import duration, printable
from shoal.protocol.api import HistoryView, StatusView

LINE_INTERVAL_S = 10.0
KEPT_NOTES = 100


class LiveView:
    def __init__(
        self,
        title: str = "shoal",
        *,
        console: Console | None = None,
        line_interval_s: float = LINE_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = title
        self._console = console or Console()
        self._clock, self._line_interval_s = clock, line_interval_s
        self._opened_at = clock()
        self._status: StatusView | None = None
        self._history: HistoryView | None = None
        self._status_at = self._opened_at
        self._notice = ""
        self._notes: list[Happening] = []
        self._ended: dict[str, str] = {}
        self._lines = _Lines(self._console)
        self._live = Live(console=self._console, auto_refresh=False) if draws_pictures(self._console) else None

    def __enter__(self) -> "LiveView":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The last picture stays on the screen."""
        if self._live is not None:
            self._live.stop()

    def update(self, status: StatusView, history: HistoryView) -> None:
        self._status, self._history, self._status_at = status, history, self._clock()
        self._notice = ""
        self._show()

    def wait(self, notice: str) -> None:
        """Say what is being waited for until the next update."""
        if notice != self._notice:
            self._notice = notice
            self._show()

    def note(self, text: str, tone: Tone = "info") -> None:
        """Something happened on this host; it is shown with the events of the swarm."""
        self._notes = [*self._notes, Happening(self._run_time_s(), text, tone)][-KEPT_NOTES:]
        self._show()

    def ended(self, worker: str, reason: str) -> None:
        """A worker of this host ended for good; it stays in the table, with the reason."""
        self._ended[worker] = reason
        self.note(f"{worker} ended for good: {reason}", "bad")

    def _run_time_s(self) -> float:
        known_s = self._status.uptime_s if self._status else 0.0
        return known_s + self._clock() - self._status_at

    def _show(self) -> None:
        extra = ViewExtra(self._title, self._notice, self._notes, self._ended)
        if self._live is not None:
            self._live.update(render(self._status, self._history, extra), refresh=True)
            return
        if self._status is None or self._history is None:
            self._lines.show_events(self._notes)
            self._lines.show_notice(self._notice)
            return
        self._lines.show_events(happenings(self._status, self._history, extra))
        self._lines.show_alerts(alert_lines(self._status))
        self._lines.show_notice(self._notice)
        self._lines.show_progress(self._status, self._history, self._clock(), self._line_interval_s)


class _Lines:
    """Prints each fact once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed: set[tuple[float, str]] = set()
        self._notice = ""
        self._alerts: set[str] = set()
        self._progress: tuple[int, int] | None = None
        self._progress_at = 0.0

    def show_events(self, events: list[Happening]) -> None:
        for event in events:
            if (event.at_s, event.text) not in self._printed:
                self._printed.add((event.at_s, event.text))
                self._print(f"[{duration(event.at_s)}] {event.text}")

    def show_alerts(self, lines: list[str]) -> None:
        """Each alert when it begins; its numbers may change while it lasts."""
        names = {line.partition(":")[0] for line in lines}
        for line in lines:
            if line.partition(":")[0] not in self._alerts:
                self._print(line)
        self._alerts = names

    def show_notice(self, notice: str) -> None:
        if notice and notice != self._notice:
            self._print(notice)
            self._notice = notice

    def show_progress(self, status: StatusView, history: HistoryView, now: float, interval_s: float) -> None:
        progress = (status.newest_version, len(history.evaluations))
        if progress != self._progress or now - self._progress_at >= interval_s:
            self._progress, self._progress_at = progress, now
            self._print(progress_line(status, history))

    def _print(self, line: str) -> None:
        safe = printable(line, 400).encode("ascii", "replace").decode()
        self._console.print(safe, markup=False, highlight=False, soft_wrap=True)


def progress_line(status: StatusView, history: HistoryView) -> str:
    """The run in one line."""
    reward = series.metric_curve(history, series.REWARD)
    heldout = series.heldout_curve(history)
    present = sum(count for state, count in status.worker_counts.items() if state not in ("gone", "banned"))
    parts = [
        f"[{duration(status.uptime_s)}] step {min(status.step, status.steps)}/{status.steps}",
        f"version {status.newest_version}",
        f"reward {reward[-1][1]:.3f}" if reward else "reward -",
        f"held-out {heldout[-1][1]:.3f}" if heldout else "held-out -",
        f"groups {status.useful_groups}/{status.groups_needed}",
        f"workers {present}",
        f"accepted {status.verdicts.get('accepted', 0)}",
        f"rejected {status.verdicts.get('rejected', 0)}",
        f"banned {len(history.bans)}",
    ]
    return "  ".join(parts)


def write_picture(
    path: Path,
    status: StatusView,
    history: HistoryView,
    extra: ViewExtra | None = None,
    *,
    columns: int = 100,
    rows: int = 40,
) -> None:
    """The live picture as an SVG file that loads nothing."""
    console = Console(width=columns, height=rows, record=True, file=io.StringIO(), force_terminal=True)
    console.print(render(status, history, extra))
    drawing = console.export_svg(title=extra.title if extra else "shoal")
    write_atomic(path, re.sub(r"@font-face \{.*?\}", "", drawing, flags=re.DOTALL).encode())


def draws_pictures(console: Console) -> bool:
    """A real terminal that can show braille."""
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
