"""Curves out of a run's history: points by step, by version and by phase.

A version's report is a flat record of metrics whose names may come and go between releases; what is missing, is not a number
or is not finite is left out, never guessed.
"""

import math
from collections.abc import Mapping, Sequence

from shoal.protocol.api import HistoryView, VersionView

Report = Mapping[str, float | int | str | None]
Point = tuple[float, float]

REWARD = ("reward_mean",)
TASK_REWARD = ("task_reward_mean",)
LENGTH = ("output_length_mean", "mean_length")
OBSERVATIONS = ("observations_mean",)
ENTROPY = ("entropy",)
GRADIENT_NORM = ("grad_norm_mean", "grad_norm")
BYTES = ("bytes_total",)
WEIGHTS = ("weights_bytes",)
TOKENS = ("trained_tokens", "tokens")
TOTALS = {"step", "time_step", "time_total"}


def number(report: Report, names: Sequence[str]) -> float | None:
    """The first of these metrics that is a finite number."""
    for name in names:
        value = report.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return None


def metric_curve(history: HistoryView, names: Sequence[str]) -> list[Point]:
    """A metric over steps. Version v was made by step v − 1, whose rollouts came from versions up to v − 1."""
    values = [(version.version - 1, number(version.report, names)) for version in history.versions if version.version]
    return [(float(step), value) for step, value in values if value is not None]


def bytes_curve(history: HistoryView, names: Sequence[str] = BYTES) -> list[Point]:
    """Bytes on the wire of every version, the base model included."""
    values = [(version.version, number(version.report, names)) for version in history.versions]
    return [(float(made), value) for made, value in values if value is not None]


def delta_ratio(history: HistoryView) -> float | None:
    """How many times less than whole weights the deltas were, over all versions that have one."""
    sizes = [(number(version.report, WEIGHTS), number(version.report, BYTES)) for version in history.versions]
    deltas = [(whole, sent) for whole, sent in sizes if whole is not None and sent is not None and sent < whole]
    return sum(whole for whole, _ in deltas) / max(1.0, sum(sent for _, sent in deltas)) if deltas else None


def heldout_curve(history: HistoryView) -> list[Point]:
    return [(float(evaluation.version), evaluation.accuracy) for evaluation in history.evaluations]


def phases(report: Report) -> dict[str, float]:
    """Seconds by phase: metrics `time_PHASE_s`, or where there are none the trainer's own `PHASE_s`."""
    timed = {name.removesuffix("_s"): name for name in report if name.endswith("_s") and not name.endswith("_per_s")}
    service = {name: key for name, key in timed.items() if name.startswith("time_")}
    chosen = {name: number(report, (key,)) for name, key in (service or timed).items() if name not in TOTALS}
    return {name.removeprefix("time_"): value for name, value in chosen.items() if value is not None}


def phase_table(versions: Sequence[VersionView]) -> dict[str, list[float]]:
    """Seconds of each phase that ever took time, one entry per version."""
    rows = [phases(version.report) for version in versions]
    names = dict.fromkeys(name for row in rows for name, seconds in row.items() if seconds > 0)
    return {name: [row.get(name, 0.0) for row in rows] for name in names}


def seconds_per_step(history: HistoryView, over: int = 8) -> float | None:
    """Mean time between the last published versions."""
    times = [version.published_s for version in history.versions][-over - 1 :]
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
