"""What the runs of `length_scaling` say together: exponents, gaps and crossing times.

In: one stored run per length, in growing order, and the run of short windows with as many frames per step as the longest. Fits
leave out length 1, the frame alone. Intervals are 95 % over held-out sessions; there is one seed per run.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.frame_experiments.fits import (
    Floats,
    alpha_interval,
    crossing_s,
    extrapolated_crossing_s,
    mean_interval,
    power_law,
    power_law_with_floor,
)

Piece = dict[str, Any]
LEAST_FITTED = 2


def summarise(rows: Sequence[Piece], control: Piece, steps: int) -> Piece:
    last, longest = str(steps), rows[-1]
    fitted = [row for row in rows if row["length"] >= LEAST_FITTED]
    lengths = [row["length"] for row in fitted]
    own = exponent(lengths, by_session(fitted, last, "own"))
    same = exponent(lengths, by_session(fitted, last, "carried"))
    gap = np.array(control["milestones"][last]["carried"]) - np.array(longest["milestones"][last]["carried"])
    return {
        **own,
        "with_floor": with_floor(lengths, by_session(fitted, last, "own")),
        **{f"{name}_same_targets": value for name, value in same.items()},
        "alpha_by_step": {step: exponent(lengths, by_session(fitted, step, "own")) for step in longest["milestones"]},
        **crossings(rows),
        "equal_frames_gap": _rounded(gap.mean()),
        "equal_frames_gap_interval": [_rounded(value) for value in mean_interval(gap)],
        "own_length_loss": losses(rows, last, "own"),
        "same_targets_loss": losses(rows, last, "carried"),
        "own_loss_by_step": {step: losses(rows, step, "own") for step in longest["milestones"]},
        "equal_frames_loss": {name: _mean(control["milestones"][last][name]) for name in ("own", "carried")},
        "running_mean_of_longest": running_mean(longest["milestones"][last]["by_position"], rows),
        "history": longest["history"],
        "curves": {str(row["length"]): row["curve"] for row in rows},
        "frames_per_s": {str(row["length"]): row["frames_per_s"] for row in rows},
        "cpu_s": {f"{row['length']}x{row['batch']}": row["cpu_s"] for row in (*rows, control)},
        **{name: longest[name] for name in ("parameters", "train_actions", "skipped_files", "plan")},
        "steps": steps,
    }


def by_session(rows: Sequence[Piece], step: str, name: str) -> Floats:
    """[lengths, sessions]."""
    return np.array([row["milestones"][step][name] for row in rows])


def exponent(lengths: Sequence[int], by_session: Floats) -> Piece:
    alpha, _, r2 = power_law(lengths, by_session.mean(axis=1))
    interval = [_rounded(value) for value in alpha_interval(lengths, by_session)]
    return {"alpha": _rounded(alpha), "alpha_interval": interval, "r2": _rounded(r2)}


def with_floor(lengths: Sequence[int], by_session: Floats) -> Piece:
    floor, alpha, _, r2 = power_law_with_floor(lengths, by_session.mean(axis=1))
    return {"floor": _rounded(floor), "alpha": _rounded(alpha), "r2": _rounded(r2)}


def crossings(rows: Sequence[Piece]) -> Piece:
    """When the longer of two runs stays below the shorter one, measured where both ran; beyond that, extrapolated."""
    curves = {row["length"]: row["curve"] for row in rows}
    found = {f"{a}-{b}": crossing_s(curves[a], curves[b]) for a, b in itertools.combinations(curves, 2)}
    beyond = {
        f"{a}-{b}": extrapolated_crossing_s(curves[a], curves[b])
        for a, b in itertools.combinations(curves, 2)
        if found[f"{a}-{b}"] is None
    }
    doubles = {str(a): found[f"{a}-{b}"] for a, b in itertools.pairwise(curves)}
    return {"overtaken_by_double": doubles, "crossings_s": found, "extrapolated_crossings_s": beyond}


def running_mean(by_position: Sequence[float], rows: Sequence[Piece]) -> Piece:
    """Mean loss of the longest run up to each length: what more history at the test alone gives."""
    mean = np.cumsum(by_position) / np.arange(1, len(by_position) + 1)
    return {str(row["length"]): _rounded(mean[row["length"] - 1]) for row in rows}


def losses(rows: Sequence[Piece], step: str, name: str) -> Piece:
    return {str(row["length"]): _mean(row["milestones"][step][name]) for row in rows}


def _mean(values: Sequence[float]) -> float:
    return _rounded(np.mean(values))


def _rounded(value: Any) -> float:
    return round(float(value), 4)
