"""Facts of which a run has one: its id, its start, what its owner wants, the trainer's checkpoints, its epoch."""

import json
from dataclasses import dataclass
from typing import Literal

from shoal.coordinator.rules.runs import RunClock
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import query

Name = Literal[
    "run_id",
    "started_at",
    "stops",
    "run_state",
    "checkpoints",
    "page_rotation",
    "epoch",
    "attempt",
    "committed",
    "terms",
    "open_verdicts",
]
LAST_SIGN = (
    "SELECT MAX(at) AS at FROM (SELECT MAX(at) AS at FROM ledger UNION ALL SELECT MAX(issued_at) AS at FROM leases"
    " UNION ALL SELECT MAX(at) AS at FROM evaluations UNION ALL SELECT MAX(seen_at) AS at FROM presence) AS signs"
)


@dataclass(frozen=True)
class Moment:
    at: float | None


def read(connection: Connection, name: Name) -> str | None:
    row = connection.execute("SELECT value FROM meta WHERE name=?", (name,)).fetchone()
    return None if row is None else str(row["value"])


def write(connection: Connection, name: Name, value: str) -> None:
    connection.execute(
        "INSERT INTO meta (name, value) VALUES (?,?) ON CONFLICT (name) DO UPDATE SET value=excluded.value",
        (name, value),
    )


def run_clock(connection: Connection) -> RunClock:
    stops = json.loads(read(connection, "stops") or "[]")
    return RunClock(float(read(connection, "started_at") or 0.0), tuple((begin, end) for begin, end in stops))


def leave_out_stop(connection: Connection, now: float) -> None:
    """A start after a stop: the time since the last sign of a coordinator does not count."""
    stops = run_clock(connection).stops
    last = query(connection, Moment, LAST_SIGN)[0].at or now
    write(connection, "stops", json.dumps([*stops, (min(max(last, stops[-1][1] if stops else last), now), now)]))
