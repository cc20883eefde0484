"""The curves of the overview, by column: small enough that a thousand steps load at once. Reads only."""

import json
import math
from collections.abc import Mapping, Sequence

from shoal.coordinator.pulse import finite, wilson
from shoal.coordinator.rules.runs import RunClock
from shoal.coordinator.store import meta
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import select
from shoal.coordinator.store.tables import BatchRow, EvaluationRow, VersionRow
from shoal.protocol.page_views import CurvesView, EvaluationPoint, Value

DIGITS = 5
Z_95 = 1.959964
SHOWN = (
    "reward_mean", "reward_low", "reward_high", "task_reward_mean", "generated_reward_mean", "output_length_mean",
    "truncation_rate",
    "repetition_rate", "entropy", "clip_fraction_positive", "clip_fraction_negative", "kl_behaviour", "kl_update",
    "ratio_max", "grad_norm_mean", "age_mean", "zero_signal_fraction", "bytes_total", "trained_tokens",
    "time_wait_batch_s", "time_fetch_s", "time_old_logprobs_s", "time_update_s", "time_stage_s",
)  # fmt: skip
"""Metrics of a version's report that the page draws, where a run has them."""


def curves(connection: Connection) -> CurvesView:
    clock = meta.run_clock(connection)
    versions = select(connection, VersionRow, "WHERE version > 0 ORDER BY version")
    reports = [with_interval(json.loads(row.report) | {"bytes_total": row.bytes_total}) for row in versions]
    batches = select(connection, BatchRow, "ORDER BY step")
    return CurvesView(
        steps=[row.version - 1 for row in versions],
        published_s=[round(clock.at_s(row.published_at), 1) for row in versions],
        metrics={name: column for name in SHOWN if (column := _column(reports, name)) is not None},
        evaluations=[_evaluation(row, clock) for row in select(connection, EvaluationRow, "ORDER BY version")],
        ages=_ages(batches),
        age_steps=[row.step for row in batches],
    )


def with_interval(report: dict[str, object]) -> dict[str, object]:
    """Adds the 95 % interval of the mean reward."""
    mean, spread, samples = (finite(report, name) for name in ("reward_mean", "reward_std", "samples"))
    if mean is None or spread is None or not samples:
        return report
    half = Z_95 * spread / math.sqrt(samples)
    return report | {"reward_low": mean - half, "reward_high": mean + half}


def _column(reports: Sequence[Mapping[str, object]], name: str) -> list[Value] | None:
    values = [finite(report, name) for report in reports]
    known = any(value is not None for value in values)
    return [None if value is None else _rounded(value) for value in values] if known else None


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _evaluation(row: EvaluationRow, clock: RunClock) -> EvaluationPoint:
    body = json.loads(row.body)
    low, high = wilson(body["accuracy"], body["problems"])
    return EvaluationPoint(
        version=row.version,
        at_s=round(clock.at_s(row.at), 1),
        accuracy=body["accuracy"],
        low=_rounded(low),
        high=_rounded(high),
        problems=body["problems"],
    )


def _ages(batches: Sequence[BatchRow]) -> dict[int, list[int]]:
    counted = [{int(age): count for age, count in json.loads(row.ages).items()} for row in batches]
    return {age: [ages.get(age, 0) for ages in counted] for age in sorted({age for ages in counted for age in ages})}
