"""The owner's timeline: leases of a window, who was late, which were second leases of a slot, and where versions arrived when."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from shoal.coordinator.rules.deliveries import IN_TIME, IN_TIME_SLACK_S
from shoal.coordinator.rules.runs import RunClock
from shoal.coordinator.run import Run
from shoal.coordinator.states import DROPPED, LeaseState
from shoal.coordinator.store import meta, records
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import query, select
from shoal.coordinator.store.tables import VersionRow
from shoal.metrics import Record
from shoal.protocol.page_views import OwnerArrival, OwnerLease, OwnerTimeline, TimelineAddress

MOST_LEASES = 4000
MOST_VERSIONS = 40


@dataclass(frozen=True)
class LeaseSpan:
    """A lease in wall-clock time; without an end it goes on."""

    worker: str
    step: int
    slot: int
    policy_version: int
    state: LeaseState
    issued_at: float
    expires_at: float
    received_at: float | None
    accepted: bool | None

    def ended_at(self, now: float) -> float | None:
        if self.received_at is not None:
            return self.received_at
        return None if self.state == LeaseState.LEASED else min(self.expires_at, now)


@dataclass(frozen=True)
class _FirstUse:
    version: int
    worker: str
    at: float


def timeline(
    connection: Connection, run: Run, address: TimelineAddress, relay_events: Iterable[Record]
) -> OwnerTimeline:
    clock, now = meta.run_clock(connection), run.clock()
    last = max(now if run.is_live else _last_sign(connection), 0.0)
    until = last if address.until_s is None else _wall(clock, address.until_s, last)
    since = max(clock.started_at, until - address.window_s)
    spans = _spans(connection, run, since, until)
    late = late_spans(spans, last)
    versions = select(
        connection,
        VersionRow,
        "WHERE published_at BETWEEN ? AND ? ORDER BY version DESC LIMIT ?",
        (since, until, MOST_VERSIONS),
    )[::-1]
    return OwnerTimeline(
        from_s=clock.at_s(since),
        until_s=clock.at_s(until),
        leases=[_view(span, clock, last, span in late, span in backups(spans)) for span in spans],
        versions=_arrivals(connection, versions, clock, list(relay_events)),
        names=records.worker_names(connection),
        late=[key for key, _ in Counter(span.worker for span in late).most_common()],
    )


def late_spans(spans: Sequence[LeaseSpan], now: float) -> set[LeaseSpan]:
    """Leases that came to nothing, or took much longer than the median of the window."""
    times = [span.received_at - span.issued_at for span in spans if span.received_at is not None]
    usual_s = median(times) if times else None
    limit_s = max(IN_TIME * usual_s, usual_s + IN_TIME_SLACK_S) if usual_s is not None else float("inf")
    return {
        span
        for span in spans
        if span.state in DROPPED or (span.received_at or min(now, span.expires_at)) - span.issued_at > limit_s
    }


def backups(spans: Sequence[LeaseSpan]) -> set[LeaseSpan]:
    """Leases of a slot on which another key still worked."""
    found: set[LeaseSpan] = set()
    by_slot: dict[tuple[int, int], list[LeaseSpan]] = {}
    for span in sorted(spans, key=lambda span: span.issued_at):
        earlier = by_slot.setdefault((span.step, span.slot), [])
        if any((one.ended_at(float("inf")) or float("inf")) > span.issued_at for one in earlier):
            found.add(span)
        earlier.append(span)
    return found


def _spans(connection: Connection, run: Run, since: float, until: float) -> list[LeaseSpan]:
    rows = query(
        connection,
        LeaseSpan,
        "SELECT leases.worker AS worker, step, slot, policy_version, leases.state AS state, issued_at, expires_at,"
        " received_at, CASE WHEN verdict LIKE '%\"accepted\":true%' THEN 1"
        " WHEN verdict LIKE '%\"accepted\":false%' THEN 0 ELSE NULL END AS accepted"
        " FROM leases LEFT JOIN submissions USING (lease_id)"
        " WHERE issued_at BETWEEN ? AND ? ORDER BY issued_at DESC LIMIT ?",
        (since - run.config.coordinator.lease_s, until, MOST_LEASES),
    )
    return [span for span in rows[::-1] if (span.ended_at(until) or until) >= since]


def _view(span: LeaseSpan, clock: RunClock, now: float, is_late: bool, is_backup: bool) -> OwnerLease:
    ended = span.ended_at(now)
    return OwnerLease(
        worker=span.worker,
        step=span.step,
        slot=span.slot,
        policy_version=span.policy_version,
        state=span.state,
        issued_s=clock.at_s(span.issued_at),
        ended_s=None if ended is None else clock.at_s(ended),
        expires_s=clock.at_s(span.expires_at),
        is_late=is_late,
        is_backup=is_backup,
        accepted=span.accepted,
    )


def _arrivals(
    connection: Connection, versions: Sequence[VersionRow], clock: RunClock, relay_events: Sequence[Record]
) -> list[OwnerArrival]:
    if not versions:
        return []
    uses = query(
        connection,
        _FirstUse,
        "SELECT policy_version AS version, worker, MIN(issued_at) AS at FROM leases"
        " WHERE policy_version BETWEEN ? AND ? GROUP BY policy_version, worker",
        (versions[0].version, versions[-1].version),
    )
    return [
        OwnerArrival(
            version=row.version,
            published_s=clock.at_s(row.published_at),
            workers={use.worker: clock.at_s(use.at) for use in uses if use.version == row.version},
            relays={url: clock.at_s(at) for url, at in _relays_with(row.version, relay_events).items()},
        )
        for row in versions
    ]


def _relays_with(version: int, relay_events: Sequence[Record]) -> dict[str, float]:
    """When each relay first said that it holds this version or a newer one."""
    found: dict[str, float] = {}
    for record in relay_events:
        if isinstance(held := record.get("newest_version"), int) and held >= version:
            found.setdefault(str(record.get("url", "")), float(record["at"]))
    return found


def _last_sign(connection: Connection) -> float:
    return query(connection, meta.Moment, meta.LAST_SIGN)[0].at or 0.0


def _wall(clock: RunClock, at_s: float, last: float) -> float:
    """The wall-clock time of a moment of the run, found by halving: stops make it no plain sum."""
    low, high = clock.started_at, max(last, clock.started_at)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if clock.at_s(middle) < at_s else (low, middle)
    return high
