"""Views of the coordinator: status for people and programs, history for reports. Reads only."""

import json
from collections import Counter
from dataclasses import dataclass

from shoal.coordinator import ledger
from shoal.coordinator.batching import retention, rewinds
from shoal.coordinator.batching.steps import read_run, run_state, step_counts
from shoal.coordinator.batching.timing import timing_view
from shoal.coordinator.ledger.held_back import public_extent
from shoal.coordinator.pulse import free_bytes, read_pulse
from shoal.coordinator.relays import KnownRelay
from shoal.coordinator.rules import batches
from shoal.coordinator.rules.alerts import Raised
from shoal.coordinator.rules.runs import RunClock
from shoal.coordinator.run import Run
from shoal.coordinator.states import UNDECIDED, SubmissionState, one_of
from shoal.coordinator.store import meta, task_stats
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import query, select
from shoal.coordinator.store.tables import BatchRow, EvaluationRow, VersionRow, WorkerRow
from shoal.protocol import api
from shoal.protocol.verdicts import public_reason

RECENT_VERDICTS = 12
SHOWN_WORKERS = 100
SHOWN_BANS = 200


@dataclass(frozen=True)
class _SubmissionCount:
    state: SubmissionState
    n: int


@dataclass(frozen=True)
class _WorkerTotals:
    state: str
    n: int
    accepted: int
    rejected: int


@dataclass(frozen=True)
class _Verdict:
    decided_at: float
    worker: str
    verdict: str
    step: int


@dataclass(frozen=True)
class _Ages:
    ages: str


def worker_view(connection: Connection, run: Run, row: WorkerRow) -> api.WorkerView:
    presence = run.presence.workers.get(row.key)
    return api.WorkerView(
        key=row.key,
        name=row.name,
        state=row.state,
        reason=public_reason(row.reason),
        credit_held=row.credit_held,
        credit_released=row.credit_released,
        submissions_accepted=row.accepted,
        submissions_rejected=row.rejected,
        last_seen_s=round(run.clock() - presence.seen_at, 1) if presence else -1.0,
        activity=presence.activity if presence else "",
        tokens_per_s=row.tokens_per_s,
        memory_bytes=row.memory_bytes,
        link_bytes_per_s=row.link_bytes_per_s,
        banned_at_s=None if row.banned_at is None else meta.run_clock(connection).at_s(row.banned_at),
    )


def relay_views(run: Run) -> list[api.RelayView]:
    return [relay_view(run, key, relay) for key, relay in run.presence.relays.listed()]


def relay_view(run: Run, key: str, relay: KnownRelay) -> api.RelayView:
    success = run.presence.relays.success(relay)
    return api.RelayView(
        key=key,
        url=relay.body.url,
        exchanges=relay.body.exchanges,
        newest_version=relay.body.newest_version,
        bytes_sent=relay.body.bytes_sent,
        bytes_received=relay.body.bytes_received,
        last_seen_s=round(run.clock() - relay.seen_at, 1),
        success=round(success.share, 4) if success else None,
        reporters=success.reporters if success else 0,
    )


def relays(run: Run, key: str = "") -> api.RelaysAnswer:
    """The list, and whether the relay that asks has a place in it."""
    listed = relay_views(run)
    is_listed = any(view.key == key for view in listed)
    return api.RelaysAnswer(relays=listed, origin_url=run.config.origin_url, is_listed=is_listed)


def live_relay_urls(run: Run) -> list[str]:
    since = run.clock() - run.config.coordinator.gone_after_s
    return [relay.body.url for _, relay in run.presence.relays.listed() if relay.seen_at >= since]


def status(connection: Connection, run: Run) -> api.StatusView:
    now, clock = read_run(connection, run), meta.run_clock(connection)
    counts = step_counts(connection, run, now.step)
    timing = run.timing.decision if run.timing is not None else None
    wanted = batches.groups_wanted(counts, run.config.training, timing.useful_share if timing is not None else None)
    submissions = _submissions_by_state(connection)
    workers = query(
        connection,
        _WorkerTotals,
        "SELECT state, COUNT(*) AS n, SUM(accepted) AS accepted, SUM(rejected) AS rejected FROM workers GROUP BY state",
    )
    entries, head = ledger.head(connection)
    pulse = read_pulse(connection, run, now)
    return api.StatusView(
        run_id=run.descriptor.run_id,
        run_state=now.state,
        epoch=now.epoch,
        uptime_s=round(clock.at_s(_ended_at(connection) if now.state == "finished" else run.clock()), 1),
        step=now.step,
        steps=run.config.run.steps,
        async_level=run.config.training.async_level,
        newest_version=now.newest_version,
        useful_groups=counts.useful,
        groups_needed=run.config.training.groups_per_step,
        slots_open=-(-wanted // run.descriptor.rollouts.tasks_per_slot),
        submissions_pending=sum(submissions.get(state, 0) for state in UNDECIDED),
        workers=[worker_view(connection, run, row) for row in _foremost_workers(connection)],
        worker_counts={row.state: row.n for row in workers},
        relays=relay_views(run),
        verdicts={
            "accepted": sum(int(row.accepted) for row in workers),
            "rejected": sum(int(row.rejected) for row in workers),
            "quarantined": submissions.get(SubmissionState.QUARANTINED, 0),
            "void": submissions.get(SubmissionState.VOID, 0),
        },
        recent_verdicts=_recent_verdicts(connection, clock),
        age_histogram=age_histogram(connection),
        ledger_entries=entries,
        ledger_head=head,
        rollouts_collected=retention.collected_count(connection),
        disk_free_bytes=free_bytes(run),
        takes_work=run.has_space(),
        starving=pulse.provision.side,
        advice=pulse.provision.sentence,
        workers_needed=pulse.provision.needs.workers,
        workers_present=pulse.rates.workers,
        validators_needed=pulse.provision.needs.validators,
        validators_present=pulse.rates.validators,
        relays_needed=pulse.provision.needs.relays,
        relays_mbit_s=pulse.provision.needs.relays_mbit_s,
        alerts=[alert_view(raised) for raised in pulse.alerts],
        lease_timing=timing_view(run.timing) if run.timing is not None else None,
    )


def ledger_extent(connection: Connection, run: Run, *, is_owner: bool) -> ledger.Extent:
    """Entries of the ledger that the caller may read."""
    if is_owner:
        return ledger.whole(connection)
    return public_extent(connection, is_over=run_state(connection, run) == "finished")


def alert_view(raised: Raised) -> api.AlertView:
    alert = raised.alert
    return api.AlertView(
        name=alert.name, seen=raised.seen, means=alert.means, threshold=alert.threshold, advice=alert.advice
    )


def _submissions_by_state(connection: Connection) -> dict[SubmissionState, int]:
    """Of all states but the usual end, whose number only grows."""
    shown = one_of(*UNDECIDED, SubmissionState.QUARANTINED, SubmissionState.VOID)
    sql = f"SELECT state, COUNT(*) AS n FROM submissions WHERE state IN {shown} GROUP BY state"
    return {row.state: row.n for row in query(connection, _SubmissionCount, sql)}


def _ended_at(connection: Connection) -> float:
    """When the last version was published or measured."""
    ends = "SELECT MAX(at) AS at FROM evaluations UNION ALL SELECT MAX(published_at) AS at FROM versions"
    return query(connection, meta.Moment, f"SELECT MAX(at) AS at FROM ({ends}) AS ends")[0].at or 0.0


def _foremost_workers(connection: Connection) -> list[WorkerRow]:
    """Every worker of a small swarm; in a large one those with the most accepted work, in order of joining."""
    return query(
        connection,
        WorkerRow,
        "SELECT * FROM (SELECT * FROM workers ORDER BY accepted DESC, registered_at LIMIT ?) AS foremost"
        " ORDER BY registered_at",
        (SHOWN_WORKERS,),
    )


def _recent_verdicts(connection: Connection, clock: RunClock) -> list[api.VerdictView]:
    rows = query(
        connection,
        _Verdict,
        "SELECT decided_at, submissions.worker AS worker, verdict, leases.step AS step"
        " FROM submissions JOIN leases USING (lease_id)"
        f" WHERE submissions.state='{SubmissionState.DECIDED}' ORDER BY decided_at DESC LIMIT ?",
        (RECENT_VERDICTS,),
    )
    return [_verdict_view(row, clock) for row in rows]


def _verdict_view(row: _Verdict, clock: RunClock) -> api.VerdictView:
    verdict = json.loads(row.verdict)
    return api.VerdictView(
        at_s=round(clock.at_s(row.decided_at), 1),
        worker=row.worker,
        step=row.step,
        accepted=verdict["accepted"],
        reasons=verdict["reasons"],
    )


def age_histogram(connection: Connection) -> dict[int, int]:
    ages: Counter[int] = Counter()
    for row in query(connection, _Ages, "SELECT ages FROM batches"):
        ages.update(_ages(row.ages))
    return dict(sorted(ages.items()))


def _ages(text: str) -> dict[int, int]:
    return {int(age): count for age, count in json.loads(text).items()}


def history(connection: Connection, run: Run) -> api.HistoryView:
    clock = meta.run_clock(connection)
    banned = select(connection, WorkerRow, "WHERE banned_at IS NOT NULL ORDER BY banned_at DESC LIMIT ?", (SHOWN_BANS,))
    return api.HistoryView(
        versions=_versions(connection, clock),
        evaluations=[
            api.EvaluationView(**json.loads(row.body), at_s=clock.at_s(row.at))
            for row in select(connection, EvaluationRow, "ORDER BY version")
        ],
        batches=_batches(connection, clock),
        bans=[worker_view(connection, run, row) for row in reversed(banned)],
        rewinds=rewinds.views(connection),
        tasks=task_stats.statistics(connection),
    )


def _versions(connection: Connection, clock: RunClock) -> list[api.VersionView]:
    return [
        api.VersionView(
            epoch=row.epoch,
            version=row.version,
            manifest_digest=row.manifest_digest,
            published_s=clock.at_s(row.published_at),
            report=json.loads(row.report) | {"bytes_total": row.bytes_total},
        )
        for row in select(connection, VersionRow, "ORDER BY version")
    ]


def _batches(connection: Connection, clock: RunClock) -> list[dict[str, float | int]]:
    return [
        {
            "step": row.step,
            "formed_s": clock.at_s(row.formed_at),
            "groups": row.groups,
            "generated_groups": row.generated,
            "max_age": max(_ages(row.ages), default=0),
            **{f"dropped_{reason}": count for reason, count in json.loads(row.dropped).items()},
        }
        for row in select(connection, BatchRow, "ORDER BY step")
    ]
