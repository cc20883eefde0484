"""What the coordinator shows: status for people and programs, history for reports. Reads only."""

import json
from collections import Counter

from shoal.coordinator import ledger, retention
from shoal.coordinator import task_stats as tasks
from shoal.coordinator.context import Context
from shoal.coordinator.rules import batches, trust
from shoal.coordinator.steps import current_step, newest_version, run_state, step_counts
from shoal.coordinator.store.database import Connection, Row
from shoal.coordinator.workers import trust_record
from shoal.protocol import api

RECENT_VERDICTS = 12
SHOWN_WORKERS = 100
SHOWN_BANS = 200


def started_at(connection: Connection) -> float:
    row = connection.execute("SELECT value FROM meta WHERE name='started_at'").fetchone()
    return float(row["value"]) if row else 0.0


def worker_view(connection: Connection, context: Context, row: Row) -> api.WorkerView:
    presence = context.presence.get(row["key"])
    return api.WorkerView(
        key=row["key"],
        name=row["name"],
        state=row["state"],
        reason=row["reason"],
        credit_held=row["credit_held"],
        credit_released=row["credit_released"],
        submissions_accepted=row["accepted"],
        submissions_rejected=row["rejected"],
        last_seen_s=round(context.clock() - presence.seen_at, 1) if presence else -1.0,
        activity=presence.activity if presence else "",
        tokens_per_s=row["tokens_per_s"],
        memory_bytes=row["memory_bytes"],
        link_bytes_per_s=row["link_bytes_per_s"],
        audit_rate=trust.audit_rate(trust_record(row), context.config.trust),
        banned_at_s=None if row["banned_at"] is None else row["banned_at"] - started_at(connection),
    )


def relay_views(context: Context) -> list[api.RelayView]:
    return [
        api.RelayView(
            key=key,
            url=relay.body.url,
            exchanges=relay.body.exchanges,
            newest_version=relay.body.newest_version,
            bytes_sent=relay.body.bytes_sent,
            bytes_received=relay.body.bytes_received,
            last_seen_s=round(context.clock() - relay.seen_at, 1),
        )
        for key, relay in list(context.relays.items())  # the loop's thread adds to it
    ]


def relays(context: Context) -> api.RelaysAnswer:
    return api.RelaysAnswer(relays=relay_views(context), origin_url=context.config.origin_url)


def live_relay_urls(context: Context) -> list[str]:
    since = context.clock() - context.config.coordinator.gone_after_s
    return [relay.body.url for relay in list(context.relays.values()) if relay.seen_at >= since]


def status(connection: Connection, context: Context) -> api.StatusView:
    step = current_step(connection)
    begun = started_at(connection)
    counts = step_counts(connection, context, step)
    wanted = batches.groups_wanted(counts, context.config.training)
    pending = connection.execute(
        "SELECT state, COUNT(*) AS n FROM submissions WHERE state IN ('pending','claimed','set_aside','void') GROUP BY state"
    )
    by_state = {row["state"]: row["n"] for row in pending}
    totals = connection.execute(
        "SELECT state, COUNT(*) AS n, SUM(accepted) AS accepted, SUM(rejected) AS rejected FROM workers GROUP BY state"
    ).fetchall()
    entries, head = ledger.head(connection)
    return api.StatusView(
        run_id=context.descriptor.run_id,
        run_state=run_state(connection, context),
        uptime_s=round(context.clock() - begun, 1),
        step=step,
        steps=context.config.run.steps,
        async_level=context.config.training.async_level,
        newest_version=newest_version(connection),
        useful_groups=counts.useful,
        groups_needed=context.config.training.groups_per_step,
        slots_open=-(-wanted // context.descriptor.rollouts.tasks_per_slot),
        submissions_pending=by_state.get("pending", 0) + by_state.get("claimed", 0),
        workers=[worker_view(connection, context, row) for row in _foremost_workers(connection)],
        worker_counts={row["state"]: row["n"] for row in totals},
        relays=relay_views(context),
        verdicts={
            "accepted": sum(int(row["accepted"]) for row in totals),
            "rejected": sum(int(row["rejected"]) for row in totals),
            "set_aside": by_state.get("set_aside", 0),
            "void": by_state.get("void", 0),
        },
        recent_verdicts=_recent_verdicts(connection, begun),
        age_histogram=age_histogram(connection),
        ledger_entries=entries,
        ledger_head=head,
        rollouts_collected=retention.collected_count(connection),
        disk_free_bytes=_free_bytes(context),
        takes_work=context.has_space(),
    )


def _foremost_workers(connection: Connection) -> list[Row]:
    """Everybody in a small swarm; in a large one those who did most, in order of joining."""
    return connection.execute(
        "SELECT * FROM (SELECT * FROM workers ORDER BY accepted DESC, registered_at LIMIT ?) AS foremost"
        " ORDER BY registered_at",
        (SHOWN_WORKERS,),
    ).fetchall()


def _free_bytes(context: Context) -> int | None:
    try:
        return context.free_bytes(context.submissions)
    except OSError:
        return None


def _recent_verdicts(connection: Connection, begun: float) -> list[api.VerdictView]:
    rows = connection.execute(
        "SELECT submissions.*, leases.step AS step, leases.slot AS slot FROM submissions JOIN leases USING (lease_id)"
        " WHERE submissions.state='judged' ORDER BY judged_at DESC LIMIT ?",
        (RECENT_VERDICTS,),
    )
    views = []
    for row in rows:
        verdict = json.loads(row["verdict"])
        views.append(
            api.VerdictView(
                at_s=round(row["judged_at"] - begun, 1),
                worker=row["worker"],
                step=row["step"],
                slot=row["slot"],
                accepted=verdict["accepted"],
                audited=verdict["audited"],
                reasons=verdict["reasons"],
                detail=verdict["detail"],
            )
        )
    return views


def age_histogram(connection: Connection) -> dict[int, int]:
    ages: Counter[int] = Counter()
    for row in connection.execute("SELECT ages FROM batches"):
        ages.update(_ages(row))
    return dict(sorted(ages.items()))


def _ages(batch: Row) -> dict[int, int]:
    return {int(age): count for age, count in json.loads(batch["ages"]).items()}


def history(connection: Connection, context: Context) -> api.HistoryView:
    begun = started_at(connection)
    versions = [
        api.VersionView(
            version=row["version"],
            manifest_digest=row["manifest_digest"],
            published_s=row["published_at"] - begun,
            report=json.loads(row["report"]) | {"bytes_total": row["bytes_total"]},
        )
        for row in connection.execute("SELECT * FROM versions ORDER BY version")
    ]
    evaluations = [
        api.EvaluationView(**json.loads(row["body"]), at_s=row["at"] - begun)
        for row in connection.execute("SELECT * FROM evaluations ORDER BY version")
    ]
    banned = connection.execute(
        "SELECT * FROM workers WHERE banned_at IS NOT NULL ORDER BY banned_at DESC LIMIT ?", (SHOWN_BANS,)
    ).fetchall()
    return api.HistoryView(
        versions=versions,
        evaluations=evaluations,
        batches=_batches(connection, begun),
        bans=[worker_view(connection, context, row) for row in reversed(banned)],
        tasks=tasks.statistics(connection),
    )


def _batches(connection: Connection, begun: float) -> list[dict[str, float | int]]:
    return [
        {
            "step": row["step"],
            "formed_s": row["formed_at"] - begun,
            "groups": row["groups"],
            "generated_groups": row["generated"],
            "max_age": max(_ages(row), default=0),
            **{f"dropped_{reason}": count for reason, count in json.loads(row["dropped"]).items()},
        }
        for row in connection.execute("SELECT * FROM batches ORDER BY step")
    ]
