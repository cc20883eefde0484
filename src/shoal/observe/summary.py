"""The result of a run as one JSON object, and a sentence for each goal that it missed.

Pure: the coordinator's last status and history in, metrics out. Every number is finite or null, so the file is plain JSON.
`heldout_start` is the accuracy of version 0, `heldout_end` that of the end: the mean of up to three evaluations, all of versions
from the last fifth of the run. Staleness is the age of the oldest group that a batch held.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from shoal.files import write_atomic
from shoal.observe import series
from shoal.observe.words import duration, plural
from shoal.protocol.api import EvaluationView, HistoryView, StatusView, VersionView, WorkerView

CHEATER_PREFIX = "cheater-"
LAST_EVALUATIONS = 3
END_SHARE = 0.8
"""Versions from this share of the last evaluated one on count as the end of a run."""
START_AT_MOST = 0.35
END_AT_LEAST = 0.90

Summary = dict[str, Any]


def named_cheater(name: str) -> bool:
    return name.startswith(CHEATER_PREFIX)


def summarise(
    status: StatusView,
    history: HistoryView,
    *,
    ledger_ok: bool,
    wall_s: float | None = None,
    started_cheaters: Collection[str] = (),
    role_restarts: int = 0,
    is_cheater: Callable[[str], bool] = named_cheater,
) -> Summary:
    """`wall_s` is the time of this command; without it, the age of the run. `started_cheaters` count even if they never joined."""
    honest = [worker for worker in status.workers if not is_cheater(worker.name)]
    cheaters = [worker for worker in status.workers if is_cheater(worker.name)]
    banned = {worker.name for worker in cheaters if worker.state == "banned"}
    start, end = heldout_ends(history.evaluations)
    ratio = series.delta_ratio(history)
    return {
        "run_id": status.run_id,
        "heldout_start": start,
        "heldout_end": end,
        "tool_calls_per_episode": _observations(history),
        "steps": max(0, status.newest_version),
        "steps_planned": status.steps,
        "wall_s": round(status.uptime_s if wall_s is None else wall_s, 3),
        "honest_workers": len(honest),
        "honest_rejected": sum(worker.submissions_rejected for worker in honest),
        "cheaters": len({worker.name for worker in cheaters} | set(started_cheaters)),
        "cheaters_banned": len(banned),
        "max_staleness": _max_staleness(status, history),
        "async_level": status.async_level,
        "ledger_ok": ledger_ok,
        "role_restarts": role_restarts,
        "verdicts": dict(status.verdicts),
        "age_histogram": {str(age): groups for age, groups in sorted(status.age_histogram.items())},
        "bytes_published": int(sum(amount for _, amount in series.bytes_curve(history))),
        "bytes_of_weights": int(sum(amount for _, amount in series.bytes_curve(history, series.WEIGHTS))),
        "delta_ratio": None if ratio is None else round(ratio, 2),
        "bytes_sent_by_relays": sum(relay.bytes_sent for relay in status.relays),
        "phase_s": {name: round(sum(row), 3) for name, row in series.phase_table(history.versions).items()},
        "bans": [_ban(worker) for worker in history.bans],
        "workers": [_worker(worker) for worker in status.workers],
        "evaluations": [
            {"version": row.version, "accuracy": row.accuracy, "problems": row.problems, "at_s": round(row.at_s, 3)}
            for row in history.evaluations
        ],
        "tasks": history.tasks.model_dump(),
        "groups_dropped": _dropped(history),
        "per_step": _steps(history),
    }


def _observations(history: HistoryView) -> dict[str, float] | None:
    """Observations that episodes of a batch had on average, in the first batch and in the last ones; None without episodes."""
    values = [series.number(version.report, series.OBSERVATIONS) for version in history.versions if version.version > 0]
    known = [value for value in values if value is not None]
    if not any(known):
        return None
    return {"start": round(known[0], 4), "end": round(fmean(known[-LAST_EVALUATIONS:]), 4)}


def heldout_ends(evaluations: Sequence[EvaluationView]) -> tuple[float | None, float | None]:
    """Accuracy before and after training; None where nothing was measured."""
    before = [row.accuracy for row in evaluations if row.version == 0]
    trained = sorted((row for row in evaluations if row.version > 0), key=lambda row: row.version)
    late = [row.accuracy for row in trained if row.version >= END_SHARE * trained[-1].version]
    return (
        round(before[-1], 6) if before else None,
        round(fmean(late[-LAST_EVALUATIONS:]), 6) if late else None,
    )


def failures(
    summary: Summary, *, start_at_most: float = START_AT_MOST, end_at_least: float | None = END_AT_LEAST
) -> list[str]:
    """One sentence for each goal that the run missed; none is success. Without `end_at_least` any accuracy will do."""
    start, end = summary["heldout_start"], summary["heldout_end"]
    escaped = summary["cheaters"] - summary["cheaters_banned"]
    rejected, late = summary["honest_rejected"], summary["max_staleness"] > summary["async_level"]
    checks = [
        (summary["steps"] < summary["steps_planned"], _unfinished(summary)),
        (start is None and end is None, "The policy was never evaluated."),
        (start is not None and end is None and summary["steps"] > 0, "No trained version was evaluated."),
        (start is not None and start > start_at_most, f"Held-out accuracy began at {start}, above {start_at_most}."),
        (_below(end, end_at_least), f"Held-out accuracy ended at {end}, below {end_at_least}."),
        (escaped > 0, f"{escaped} of {plural(summary['cheaters'], 'cheater')} not banned."),
        (rejected > 0, f"{plural(rejected, 'submission')} of honest workers rejected."),
        (late, f"A batch held a group {summary['max_staleness']} versions old; {summary['async_level']} is the limit."),
        (not summary["ledger_ok"], "The ledger does not verify."),
    ]
    return [sentence for failed, sentence in checks if failed]


def unused_tools(summary: Summary) -> str:
    """What to say if episodes do not call their tools more often at the end than at the start; empty if they do."""
    calls = summary["tool_calls_per_episode"]
    if calls is None:
        return "No episode called a tool."
    if calls["end"] > calls["start"]:
        return ""
    return f"Tool calls per episode went from {calls['start']} to {calls['end']}."


def headline(summary: Summary) -> str:
    """The outcome in one line."""
    start, end = (f"{value:.3f}" if value is not None else "–" for value in _heldout(summary))
    bans = f"{summary['cheaters_banned']} of {plural(summary['cheaters'], 'cheater')} banned"
    return " · ".join(
        [
            f"Held-out accuracy {start} → {end}",
            *_tool_words(summary),
            f"{plural(summary['steps'], 'step')} in {duration(summary['wall_s'])}",
            *([bans] if summary["cheaters"] else []),
            f"{plural(summary['honest_rejected'], 'honest submission')} rejected",
            "ledger verified" if summary["ledger_ok"] else "ledger broken",
        ]
    )


def _tool_words(summary: Summary) -> list[str]:
    calls = summary["tool_calls_per_episode"]
    return [] if calls is None else [f"tool calls per episode {calls['start']:.2f} → {calls['end']:.2f}"]


def write_summary(path: Path, summary: Summary) -> None:
    write_atomic(path, json.dumps(summary, indent=2, allow_nan=False).encode() + b"\n")


def _heldout(summary: Summary) -> tuple[float | None, float | None]:
    return summary["heldout_start"], summary["heldout_end"]


def _below(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value < limit


def _unfinished(summary: Summary) -> str:
    return f"Only {summary['steps']} of {plural(summary['steps_planned'], 'step')} were trained."


def _max_staleness(status: StatusView, history: HistoryView) -> int:
    return max([0, *status.age_histogram, *(int(batch.get("max_age", 0)) for batch in history.batches)])


def _ban(worker: WorkerView) -> dict[str, Any]:
    at_s = None if worker.banned_at_s is None else round(worker.banned_at_s, 3)
    return {"worker": worker.name, "key": worker.key, "at_s": at_s, "reason": worker.reason}


def _worker(worker: WorkerView) -> dict[str, Any]:
    return {
        "worker": worker.name,
        "key": worker.key,
        "state": worker.state,
        "accepted": worker.submissions_accepted,
        "rejected": worker.submissions_rejected,
        "credit_held": worker.credit_held,
        "credit_released": worker.credit_released,
    }


def _steps(history: HistoryView) -> list[dict[str, Any]]:
    """Step s made version s + 1."""
    batches = {int(batch["step"]): batch for batch in history.batches}
    made = [version for version in history.versions if version.version > 0]
    return [_step(version, batches.get(version.version - 1, {})) for version in made]


def _step(version: VersionView, batch: Mapping[str, float | int]) -> dict[str, Any]:
    report = version.report
    return {
        "step": version.version - 1,
        "version": version.version,
        "published_s": round(version.published_s, 3),
        "reward": series.number(report, series.REWARD),
        "task_reward": series.number(report, series.TASK_REWARD),
        "phase_s": series.phases(report),
        "bytes": _whole(series.number(report, series.BYTES)),
        "weights_bytes": _whole(series.number(report, series.WEIGHTS)),
        "tokens": _whole(series.number(report, series.TOKENS)),
        "mean_length": series.number(report, series.LENGTH),
        "groups": batch.get("groups"),
        "generated_groups": batch.get("generated_groups"),
        "max_age": batch.get("max_age"),
    }


def _dropped(history: HistoryView) -> dict[str, int]:
    """Accepted groups that no batch held, by reason."""
    counts: Counter[str] = Counter()
    for batch in history.batches:
        counts.update({name: int(value) for name, value in batch.items() if name.startswith("dropped_")})
    return {name.removeprefix("dropped_"): count for name, count in sorted(counts.items())}


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
