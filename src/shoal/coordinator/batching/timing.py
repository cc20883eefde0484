"""When work is leased: measures the last cycles of swarm and trainer, and remembers what was decided.

Runs inside one transaction of the store; `rules.freshness` decides. Memory belongs to the process: a restarted coordinator leases
at once until it has measured enough cycles again. Cycles are read once for each new batch or version, so that a lease costs the
same in a long run.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.coordinator.rules import freshness
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import query
from shoal.protocol import api

# Slots are numbered in the order of their first leases, so slot 0 has the first lease of its step.
CYCLES = (
    "SELECT batches.step AS step, batches.formed_at AS formed_at, this.published_at AS published_at,"
    " (SELECT MIN(issued_at) FROM leases WHERE leases.epoch=batches.epoch AND leases.step=batches.step"
    " AND leases.slot=0) AS opened_at,"
    " (SELECT formed_at FROM batches AS before WHERE before.step=batches.step-1) AS before_at,"
    " next.published_at AS trained_at, next.report AS report, batches.generated AS generated, batches.useful AS useful"
    " FROM batches JOIN versions AS this ON this.version=batches.step JOIN versions AS next ON next.version=batches.step+1"
    f" ORDER BY batches.step DESC LIMIT {freshness.MEMORY}"
)
TRAINS_SINCE = (
    "SELECT published_at, (SELECT formed_at FROM batches WHERE step=version) AS formed_at FROM versions WHERE version=?"
)


@dataclass(frozen=True)
class _Step:
    step: int
    opened_at: float | None
    before_at: float | None
    """When the batch before it was formed."""
    formed_at: float
    published_at: float
    trained_at: float
    report: str
    generated: int
    useful: int


@dataclass(frozen=True)
class _Begin:
    published_at: float
    formed_at: float | None


class Past(Protocol):
    """What has happened in the run."""

    def cycles(self, since: float) -> Sequence[freshness.Cycle]:
        """Of the last trained steps that began since then, oldest first."""
        ...

    def trains_since(self, newest: int) -> float:
        """When the trainer could begin the step of the newest version."""
        ...


@dataclass(frozen=True)
class StoredPast:
    """The past as the store has it."""

    connection: Connection

    def cycles(self, since: float) -> list[freshness.Cycle]:
        rows = query(self.connection, _Step, CYCLES)
        steps = [row for row in rows if row.opened_at is not None and row.opened_at >= since]
        return [_cycle(row, row.opened_at or 0.0) for row in reversed(steps)]

    def trains_since(self, newest: int) -> float:
        rows = query(self.connection, _Begin, TRAINS_SINCE, (newest,))
        return max((max(row.published_at, row.formed_at or 0.0) for row in rows), default=0.0)


@dataclass
class LeaseTiming:
    """What one process has measured and decided."""

    started_at: float | None = None
    """The first decision; cycles that began earlier do not count."""
    measured: tuple[int, int] | None = None
    """Step and newest version when the cycles were read."""
    cycles: Sequence[freshness.Cycle] = ()
    trains_since: float = 0.0
    decision: freshness.Timing | None = None
    decided: freshness.TimingView | None = None

    def forget(self) -> None:
        """After a rewind: cycles are measured again."""
        self.started_at, self.measured, self.decision, self.decided, self.cycles = None, None, None, None, ()

    def decide(self, past: Past, step: int, newest: int, async_level: int, now: float) -> freshness.Timing:
        if self.started_at is None:
            self.started_at = now
        if self.measured != (step, newest):
            self.cycles = past.cycles(self.started_at)
            self.trains_since = past.trains_since(newest)
            self.measured = (step, newest)
        is_waiting = self.decision is not None and self.decision.is_waiting
        self.decided = freshness.TimingView(
            step, newest, async_level, self.trains_since, now, self.cycles, is_waiting=is_waiting
        )
        self.decision = freshness.decide(self.decided)
        return self.decision


def _cycle(row: _Step, opened_at: float) -> freshness.Cycle:
    staged_s = json.loads(row.report).get("time_stage_s", 0.0)
    return freshness.Cycle(
        fill_s=row.formed_at - opened_at,
        train_s=row.trained_at - max(row.published_at, row.formed_at),
        publish_s=float(staged_s),
        generated_groups=row.generated,
        useful_groups=row.useful,
        was_begun_ahead=row.before_at is not None and opened_at < row.before_at,
    )


def timing_view(timing: LeaseTiming) -> api.LeaseTimingView | None:
    """The last decision and what it was made from; none before the first request for work."""
    decision, view = timing.decision, timing.decided
    if decision is None or view is None:
        return None
    cycles = view.cycles
    return api.LeaseTimingView(
        reason=decision.reason,
        step=view.step,
        newest_version=view.newest_version,
        oldest_version=decision.oldest_version,
        waits_s=None if decision.latest_start is None else round(max(0.0, decision.latest_start - view.now), 2),
        cycles=len(cycles),
        useful_share=None if decision.useful_share is None else round(decision.useful_share, 3),
        slowest_fill_s=round(freshness.slowest_fill_s(cycles), 3) if cycles else 0.0,
        fastest_train_s=round(min((cycle.train_s for cycle in cycles), default=0.0), 3),
        publish_s=round(max((cycle.publish_s for cycle in cycles), default=0.0), 3),
    )
