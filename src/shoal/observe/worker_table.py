"""The table of workers in the live view: those that the coordinator knows, and those of this host that ended for good. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from shoal.observe.words import count, printable
from shoal.protocol.api import StatusView, WorkerView

STATES = {
    "active": "green",
    "registered": "cyan",
    "probation": "cyan",
    "suspect": "yellow",
    "quarantined": "magenta",
    "gone": "dim",
    "banned": "bold red",
    "ended": "bold red",
}
OVER = ("finished", "drained")
NARROW_COLUMNS = 72


@dataclass(frozen=True)
class Row:
    name: str
    state: str
    doing: str
    tone: str = "dim"
    worker: WorkerView | None = None
    """None for a worker that never registered."""


def worker_rows(status: StatusView, ended: Mapping[str, str]) -> list[Row]:
    rows = [_row(worker, status.run_state, ended.get(worker.name)) for worker in status.workers]
    known = {worker.name for worker in status.workers}
    return rows + [Row(name, "ended", reason, "red") for name, reason in ended.items() if name not in known]


def _row(worker: WorkerView, run_state: str, ended: str | None) -> Row:
    if worker.state == "banned":
        return Row(worker.name, worker.state, worker.reason, "red", worker)
    if ended is not None:
        return Row(worker.name, "ended", ended, "red", worker)
    # The last heartbeat of a worker came before it learnt that the run is over.
    return Row(worker.name, worker.state, "" if run_state in OVER else worker.activity, worker=worker)


def state_counts(rows: Sequence[Row]) -> str:
    counted = {state: sum(row.state == state for row in rows) for state in STATES}
    return " · ".join(f"{number} {state}" for state, number in counted.items() if number) or "none yet"


def table(rows: Sequence[Row], width: int, most: int) -> Table:
    """At most `most` rows; the last one counts those that are left out."""
    shown = list(rows) if len(rows) <= most else list(rows)[: most - 1]
    wide = width >= NARROW_COLUMNS
    drawn = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim", show_edge=False)
    drawn.add_column("worker", no_wrap=True, overflow="ellipsis", min_width=8, max_width=22)
    drawn.add_column("state", no_wrap=True, min_width=9)
    if wide:
        drawn.add_column("doing", no_wrap=True, overflow="ellipsis", ratio=1)
    for name in ("ok", "bad", "credit", "tok/s") if wide else ("ok", "bad", "credit"):
        drawn.add_column(name, justify="right", no_wrap=True)
    for row in shown:
        drawn.add_row(*_cells(row, wide))
    if len(shown) < len(rows):
        drawn.add_row(Text(f"and {len(rows) - len(shown)} more", "dim"))
    return drawn


def _cells(row: Row, wide: bool) -> list[Text]:
    name = Text(printable(row.name, 40), "bold" if row.state != "gone" else "dim")
    cells = [name, Text(row.state, STATES.get(row.state, "default"))]
    if wide:
        cells.append(Text(printable(row.doing), row.tone))
    return cells if row.worker is None else [*cells, *_numbers(row.worker, wide)]


def _numbers(worker: WorkerView, wide: bool) -> list[Text]:
    accepted, rejected = worker.submissions_accepted, worker.submissions_rejected
    numbers = [
        Text(str(accepted), "green" if accepted else "dim"),
        Text(str(rejected), "bold red" if rejected else "dim"),
        Text(count(worker.credit_held + worker.credit_released)),
    ]
    return [*numbers, Text(count(worker.tokens_per_s))] if wide else numbers
