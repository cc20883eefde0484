"""The live picture of a run for a terminal, drawn from what the coordinator publishes.

`render` is pure: the same status and history give the same picture, fitted to whatever width and height it is printed at
(made for 100×40, whole at 80 columns). Words of untrusted machines are shown as plain text, never as markup or escapes.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shoal.metrics.units import size
from shoal.observe import series
from shoal.observe.charts import bar, curve, value_range
from shoal.observe.series import Point
from shoal.observe.words import duration, plural, printable
from shoal.observe.worker_table import state_counts, table, worker_rows
from shoal.protocol.api import HistoryView, LeaseTimingView, RelayView, StatusView

Tone = Literal["good", "bad", "warn", "info"]

TONES: dict[Tone, str] = {"good": "green", "bad": "bold red", "warn": "yellow", "info": "default"}
FRAME = "bright_black"
AXIS_COLUMNS = 6
HEADER_ROWS = 3
PANEL_ROWS = 2
TABLE_HEADER_ROWS = 1
CHART_ROWS = (3, 8)
EVENT_ROWS = (3, 8)
FACT_ROWS = 4
SAME_MOMENT_S = 1.0


@dataclass(frozen=True)
class Happening:
    """Something worth a line: a ban, a restart, a rejection."""

    at_s: float
    text: str
    tone: Tone = "info"


@dataclass(frozen=True)
class ViewExtra:
    """What the coordinator does not know."""

    title: str = "shoal"
    notice: str = ""
    """What is being waited for, if anything."""
    happenings: Sequence[Happening] = ()
    ended: Mapping[str, str] = field(default_factory=dict)
    """Workers of this host that ended for good, with the reason."""


@dataclass(frozen=True)
class Plan:
    """Rows given to each part; 0 leaves it out."""

    chart_rows: int
    worker_rows: int
    fact_rows: int
    event_rows: int

    @property
    def total(self) -> int:
        parts = (self.chart_rows + 1 if self.chart_rows else 0, self.fact_rows, self.event_rows)
        framed = sum(rows + PANEL_ROWS for rows in parts if rows)
        workers = self.worker_rows + TABLE_HEADER_ROWS + PANEL_ROWS if self.worker_rows else 0
        return HEADER_ROWS + framed + workers


def plan_rows(height: int, workers: int) -> Plan:
    """Fit the parts into the height: every worker if possible, then the charts and events as large as is left."""
    candidates = [
        Plan(chart_rows, min(workers, worker_rows), fact_rows, event_rows)
        for worker_rows in (24, 12, 8, 6, 4)
        for fact_rows, low in ((FACT_ROWS, 5), (0, CHART_ROWS[0]), (0, 0))
        for event_rows in range(EVENT_ROWS[1], EVENT_ROWS[0] - 1, -1)
        for chart_rows in (range(CHART_ROWS[1], low - 1, -1) if low else (0,))
    ]
    candidates += [Plan(0, min(workers, worker_rows), 0, 0) for worker_rows in (8, 6, 4, 3, 2)]
    return next((plan for plan in candidates if plan.total <= height), Plan(0, 0, 0, 0))


def render(status: StatusView | None, history: HistoryView | None, extra: ViewExtra | None = None) -> RenderableType:
    """The whole picture; without a status, what is being waited for."""
    extra = extra or ViewExtra()
    if status is None:
        return _Waiting(extra)
    return _Picture(status, history or HistoryView(versions=[], evaluations=[], batches=[], bans=[]), extra)


def happenings(status: StatusView, history: HistoryView, extra: ViewExtra) -> list[Happening]:
    """Bans, rejections and what the host noted, in the order they happened."""
    names = {worker.key: worker.name for worker in status.workers}
    banned = [
        Happening(worker.banned_at_s or 0.0, f"{printable(worker.name, 40)} banned: {printable(worker.reason)}", "bad")
        for worker in history.bans
    ]
    banned_at_s = {worker.key: worker.banned_at_s or 0.0 for worker in history.bans}
    rejected = [
        Happening(
            verdict.at_s,
            f"{printable(names.get(verdict.worker, verdict.worker), 40)} rejected at step {verdict.step}:"
            f" {printable(', '.join(verdict.reasons))}",
            "warn",
        )
        for verdict in status.recent_verdicts
        if not verdict.accepted and abs(verdict.at_s - banned_at_s.get(verdict.worker, -SAME_MOMENT_S)) >= SAME_MOMENT_S
    ]
    return sorted([*banned, *rejected, *extra.happenings], key=lambda happening: happening.at_s)


def alert_lines(status: StatusView) -> list[str]:
    """One line per alert, with what to do."""
    return [f"alert {one.name.replace('_', ' ')}: {printable(one.seen)}. {one.advice}" for one in status.alerts]


def startup_notice(status: StatusView, workers_here: Collection[str], ended: Collection[str]) -> str:
    """What a run without workers is waiting for; empty once there are some."""
    if status.newest_version < 0:
        return "the trainer loads the policy and publishes version 0"
    if status.workers:
        return ""
    if set(workers_here) - set(ended):
        return "workers load the policy and measure this machine"
    return "no worker of this host is left" if workers_here else "no worker has joined yet"


class _Waiting:
    def __init__(self, extra: ViewExtra) -> None:
        self._extra = extra

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        notice = printable(self._extra.notice) or "waiting for the coordinator"
        yield Text.assemble((self._extra.title, "bold"), "  ", (notice, "yellow"), no_wrap=True, overflow="ellipsis")
        rows = max(1, options.max_height - PANEL_ROWS - 2)
        if self._extra.happenings:
            yield _events(list(self._extra.happenings), min(rows, EVENT_ROWS[1]))


class _Picture:
    def __init__(self, status: StatusView, history: HistoryView, extra: ViewExtra) -> None:
        self._status, self._history, self._extra = status, history, extra

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status, history = self._status, self._history
        rows = worker_rows(status, self._extra.ended)
        plan = plan_rows(options.max_height - 1, len(rows))
        yield _header(status, history, self._extra)
        yield _progress(status, options.max_width)
        yield _batch_line(status, self._extra.notice)
        if plan.chart_rows:
            yield _charts(status, history, options.max_width, plan.chart_rows)
        if plan.worker_rows:
            yield _panel(
                table(rows, options.max_width, plan.worker_rows), f"workers {state_counts(rows)}", options.max_width
            )
        if plan.fact_rows:
            yield _facts(status, options.max_width, plan.fact_rows)
        if plan.event_rows:
            yield _events(happenings(status, history, self._extra), plan.event_rows)


def _header(status: StatusView, history: HistoryView, extra: ViewExtra) -> Text:
    title = [(extra.title, "bold")] if extra.title != status.run_id else []
    parts = [
        *title,
        (printable(status.run_id, 40), "cyan"),
        (status.run_state, "green" if status.run_state in ("running", "finished") else "yellow"),
        (f"step {min(status.step, status.steps)}/{status.steps}", "bold"),
        (f"version {status.newest_version}", ""),
        (duration(status.uptime_s), ""),
    ]
    step_s = series.seconds_per_step(history)
    left = status.steps - status.newest_version
    if step_s and left > 0:
        parts.append((f"about {duration(left * step_s)} left", "dim"))
    line = Text("  ").join(Text(text, style) for text, style in parts)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _progress(status: StatusView, width: int) -> Text:
    share = min(1.0, max(0, status.newest_version) / status.steps)
    label = f" {share:>4.0%}"
    columns = width - len(label)
    done = round(share * columns)
    return Text.assemble(("━" * done, "green"), ("─" * (columns - done), FRAME), (label, "bold"), no_wrap=True)


def _batch_line(status: StatusView, notice: str) -> Text:
    if notice:
        return Text(printable(notice), "yellow", no_wrap=True, overflow="ellipsis")
    if status.alerts:
        alert = status.alerts[0]
        more = f" (and {len(status.alerts) - 1} more)" if len(status.alerts) > 1 else ""
        text = f"{alert.name.replace('_', ' ')}: {alert.seen}{more}. {alert.advice}"
        return Text(printable(text, 400), "bold yellow", no_wrap=True, overflow="ellipsis")
    facts = (
        f"next batch {status.useful_groups}/{status.groups_needed} useful groups",
        f"{plural(status.submissions_pending, 'submission')} to check",
        f"ledger of {status.ledger_entries}",
        *([printable(status.advice)] if status.advice else []),
        *([timing_words(status.lease_timing)] if status.lease_timing is not None else []),
    )
    return Text(" · ".join(facts), "dim", no_wrap=True, overflow="ellipsis")


def timing_words(timing: LeaseTimingView) -> str:
    """When work is leased, and why."""
    measured = f"filling {timing.slowest_fill_s:.1f} s, training {timing.fastest_train_s:.1f} s"
    match timing.reason:
        case "waits_for_version":
            return f"work waits for version {timing.oldest_version} ({measured})"
        case "measuring":
            return f"work leased at once ({plural(timing.cycles, 'cycle')} measured)"
        case "trainer_waits":
            return "work leased at once (the trainer waits)"
        case "late" | "swarm_too_slow":
            return f"work leased at once ({measured})"


def _charts(status: StatusView, history: HistoryView, width: int, rows: int) -> Table:
    reward = series.metric_curve(history, series.REWARD)
    heldout = series.heldout_curve(history)
    left = width // 2
    return _side_by_side(
        [
            _chart("reward", reward, status.steps, left, rows, "cyan"),
            _chart("held-out accuracy", heldout, status.steps, width - left, rows, "green"),
        ]
    )


def _chart(name: str, points: Sequence[Point], steps: int, width: int, rows: int, colour: str) -> Panel:
    columns = max(4, width - 4 - AXIS_COLUMNS)
    y_range = value_range((y for _, y in points), 0.0, 1.0)
    lines = curve(points, columns, rows, x_range=(0, max(steps, 1)), y_range=y_range)
    labels = {0: y_range[1], rows // 2: sum(y_range) / 2, rows - 1: y_range[0]}
    text = Text(no_wrap=True)
    for row, line in enumerate(lines):
        label = f"{labels[row]:.2f}" if row in labels else ""
        text.append(f"{label:>{AXIS_COLUMNS - 2}} ┤", "dim").append(line + "\n", colour)
    text.append(f"{'0':>{AXIS_COLUMNS - 1}}└{'─' * max(0, columns - len(str(steps)))}{steps}", "dim")
    return _panel(text, f"{name} {points[-1][1]:.3f}" if points else f"{name} –", width)


def _facts(status: StatusView, width: int, rows: int) -> Table:
    first, second = width // 3, width // 3
    third = width - first - second
    return _side_by_side(
        [
            _panel(_age_bars(status, first - 4, rows), f"age of groups (≤ {status.async_level})", first, rows),
            _panel(_relay_lines(status.relays, second - 4, rows), "bytes sent", second, rows),
            _panel(_verdict_lines(status, rows), "verdicts", third, rows),
        ]
    )


def _age_bars(status: StatusView, columns: int, rows: int) -> Text:
    histogram = _binned(sorted(status.age_histogram.items()), rows)
    largest = max((groups for _, groups in histogram), default=0)
    digits = len(str(largest))
    text = Text(no_wrap=True, overflow="ellipsis")
    for age, groups in histogram:
        text.append(f"{age:>3} {groups:>{digits}} ", "dim").append(bar(groups, largest, columns - 5 - digits), "cyan")
        text.append("\n")
    return text if histogram else Text("no batch yet", "dim")


def _binned(histogram: Sequence[tuple[int, int]], rows: int) -> list[tuple[str, int]]:
    """At most `rows` bins; the last one holds everything older."""
    bins = [(str(age), groups) for age, groups in histogram[:rows]]
    if len(histogram) > rows:
        older = sum(groups for _, groups in histogram[rows - 1 :])
        bins[-1] = (f"{histogram[rows - 1][0]}+", older)
    return bins


def _relay_lines(relays: Sequence[RelayView], columns: int, rows: int) -> Text:
    total = sum(relay.bytes_sent for relay in relays)
    text = Text(no_wrap=True, overflow="ellipsis")
    for relay in list(relays)[: rows - 1]:
        address = printable(relay.url, 60).split("://")[-1].rstrip("/")
        amount = size(relay.bytes_sent)
        text.append(f"{address[: columns - len(amount) - 1]:<{columns - len(amount)}}{amount}\n")
    text.append(f"{'all relays':<{max(0, columns - len(size(total)))}}{size(total)}", "bold")
    return text if relays else Text("no relay yet", "dim")


def _verdict_lines(status: StatusView, rows: int) -> Text:
    colours = {"accepted": "green", "rejected": "red"}
    text = Text(no_wrap=True, overflow="ellipsis")
    for name, number in list(status.verdicts.items())[:rows]:
        text.append(f"{number:>6} ", colours.get(name, "default") if number else "dim")
        text.append(name.replace("_", " ") + "\n", "dim")
    return text


def _events(events: Sequence[Happening], rows: int) -> Panel:
    text = Text(no_wrap=True, overflow="ellipsis")
    for happening in events[-rows:]:
        text.append(f"{duration(happening.at_s):>7}  ", "dim")
        text.append(printable(happening.text) + "\n", TONES[happening.tone])
    return _panel(text if events else Text("nothing unusual so far", "dim"), "events", None, rows)


def _panel(content: RenderableType, title: str, width: int | None, rows: int | None = None) -> Panel:
    if isinstance(content, Text):
        content.rstrip()
    height = None if rows is None else rows + PANEL_ROWS
    heading = Text(title, "bold default", no_wrap=True, overflow="ellipsis")
    return Panel(
        content, title=heading, title_align="left", border_style=FRAME, box=box.ROUNDED, width=width, height=height
    )


def _side_by_side(panels: Sequence[Panel]) -> Table:
    grid = Table.grid(padding=0)
    for _ in panels:
        grid.add_column()
    grid.add_row(*panels)
    return grid
