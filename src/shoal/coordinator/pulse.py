"""How a run is doing: readings for the alerts and rates for the advice, from the last steps in the store. Reads only."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median

from shoal.coordinator.batching.steps import RunNow
from shoal.coordinator.rules.alerts import HeldoutReading, Raised, Readings, StepReading, check
from shoal.coordinator.rules.provisioning import Provision, Rates, provision
from shoal.coordinator.run import Run
from shoal.coordinator.states import UNDECIDED, LeaseState, SubmissionState, one_of
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import find, number, query, select
from shoal.coordinator.store.tables import BatchRow, EvaluationRow, VersionRow
from shoal.coordinator.work.deliveries import observe

RECENT_STEPS = 24
FIRST_STEPS = 8
RATE_STEPS = 8
"""Steps over which rates are averaged."""
CHECKED_FILES = 64
VALIDATOR_SILENCE_S = 60.0
LEAST_GRACE_S = 20.0


@dataclass(frozen=True)
class Pulse:
    alerts: list[Raised]
    provision: Provision
    rates: Rates


@dataclass(frozen=True)
class _Moment:
    at: float | None


@dataclass(frozen=True)
class _Checked:
    files: int
    validators: int
    seconds: float


@dataclass(frozen=True)
class _Held:
    leases: int
    workers: int


def read_pulse(connection: Connection, run: Run, now: RunNow) -> Pulse:
    versions = select(
        connection,
        VersionRow,
        "WHERE version BETWEEN 1 AND ? OR version > ? ORDER BY version",
        (FIRST_STEPS, now.newest_version - RECENT_STEPS),
    )
    rates = _rates(connection, run, now, versions[-RATE_STEPS:])
    return Pulse(check(_readings(connection, run, now, versions)), provision(rates), rates)


def _readings(connection: Connection, run: Run, now: RunNow, versions: list[VersionRow]) -> Readings:
    newest = find(connection, VersionRow, "WHERE version=?", (now.newest_version,))
    pending_s = oldest_pending_s(connection, run)
    pace = observe(connection, run).pace
    return Readings(
        steps=[_step(row) for row in versions],
        heldout=[_heldout(row) for row in select(connection, EvaluationRow, "ORDER BY version DESC LIMIT 32")][::-1],
        newest_version=now.newest_version,
        version_age_s=run.clock() - newest.published_at if newest else 0.0,
        version_users=number(
            connection,
            "SELECT COUNT(*) AS n FROM (SELECT 1 AS one FROM workers WHERE newest_used >= ? LIMIT 1) AS users",
            (now.newest_version,),
        ),
        version_grace_s=max(LEAST_GRACE_S, min(pace.grace_s, pace.work_s or pace.longest_s)),
        workers=run.presence.count(),
        oldest_pending_s=pending_s,
        claimed_lately=_claimed_lately(connection, run),
        disk_free_bytes=free_bytes(run),
        disk_needed_bytes=run.min_free_bytes,
        is_running=now.state == "running" and now.newest_version == now.step,
    )


def _step(row: VersionRow) -> StepReading:
    report = json.loads(row.report)
    return StepReading(
        row.version - 1,
        reward=finite(report, "reward_mean"),
        entropy=finite(report, "entropy"),
        divergence=finite(report, "kl_behaviour"),
        truncation=finite(report, "truncation_rate"),
        repetition=finite(report, "repetition_rate"),
        audited=finite(report, "behaviour_fraction"),
    )


def _heldout(row: EvaluationRow) -> HeldoutReading:
    body = json.loads(row.body)
    low, high = wilson(body["accuracy"], body["problems"])
    return HeldoutReading(row.version, body["accuracy"], (high - low) / 2)


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of `count` tasks."""
    if count <= 0:
        return 0.0, 1.0
    z = 1.959964
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def _rates(connection: Connection, run: Run, now: RunNow, versions: list[VersionRow]) -> Rates:
    reports = [json.loads(row.report) for row in versions]
    per_slot = run.descriptor.rollouts.tasks_per_slot
    waits = [wait for report in reports if (wait := finite(report, "time_wait_batch_s")) is not None]
    times = [row.published_at for row in versions]
    batches = select(connection, BatchRow, "ORDER BY step DESC LIMIT ?", (RATE_STEPS,))
    checked = _checked(connection, run)
    present = [worker for key, worker in list(run.presence.workers.items()) if run.presence.is_present(key)]
    return Rates(
        groups_per_step=fmean(row.generated for row in batches) if batches else 0.0,
        step_s=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0,
        trainer_wait_s=median(waits) if waits else 0.0,  # the first one waits for the run to start
        groups_per_worker_s=_groups_per_worker_s(connection, run),
        workers=len(present),
        workers_waiting=sum(worker.waiting for worker in present),
        workers_fetching=sum(worker.fetching for worker in present),
        validators_lag_s=oldest_pending_s(connection, run),
        files_per_step=fmean(row.generated for row in batches) / per_slot if batches else 0.0,
        file_s=checked.seconds / checked.files if checked.files else 0.0,
        validators=checked.validators,
        version_bytes=median(row.bytes_total for row in versions) if versions else 0.0,
        relays=len(run.presence.relays.listed()),
    )


def _checked(connection: Connection, run: Run) -> _Checked:
    """The last files that validators decided, and what these took from the claim on."""
    last = (
        "SELECT claimed_by, decided_at, claim_expires FROM submissions"
        f" WHERE state='{SubmissionState.DECIDED}' AND claim_expires IS NOT NULL"
        f" ORDER BY decided_at DESC LIMIT {CHECKED_FILES}"
    )
    found = query(
        connection,
        _Checked,
        "SELECT COUNT(*) AS files, COUNT(DISTINCT claimed_by) AS validators,"
        f" COALESCE(SUM(decided_at - claim_expires + ?), 0) AS seconds FROM ({last}) AS last",
        (float(run.config.validation.claim_s),),
    )[0]
    return _Checked(found.files, found.validators, max(0.0, found.seconds))


def _groups_per_worker_s(connection: Connection, run: Run) -> float:
    """Of a worker that works: groups of its leases over the time that one takes."""
    work_s = observe(connection, run).pace.work_s
    if not work_s:
        return 0.0
    held = query(
        connection,
        _Held,
        f"SELECT COUNT(*) AS leases, COUNT(DISTINCT worker) AS workers FROM leases WHERE state='{LeaseState.LEASED}'",
    )[0]
    at_once = held.leases / held.workers if held.workers else 1.0
    return run.descriptor.rollouts.tasks_per_slot * at_once / work_s


def oldest_pending_s(connection: Connection, run: Run) -> float:
    sql = f"SELECT MIN(received_at) AS at FROM submissions WHERE state IN {one_of(*UNDECIDED)}"
    oldest = query(connection, _Moment, sql)[0].at
    return 0.0 if oldest is None else max(0.0, run.clock() - oldest)


def _claimed_lately(connection: Connection, run: Run) -> bool:
    since = run.clock() - VALIDATOR_SILENCE_S
    if run.presence.validator_seen_at >= since:
        return True
    decided = "SELECT MAX(decided_at) AS at FROM submissions WHERE state='decided' AND received_at >= ?"
    latest = query(connection, _Moment, decided, (since - run.config.coordinator.lease_s,))[0].at
    return latest is not None and latest >= since


def free_bytes(run: Run) -> int | None:
    try:
        return run.free_bytes(run.submissions)
    except OSError:
        return None


def finite(report: Mapping[str, object], name: str) -> float | None:
    value = report.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
