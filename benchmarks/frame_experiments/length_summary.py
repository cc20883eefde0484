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
from benchmarks.frame_experiments.length_scaling import LOSSES, halfway

Piece = dict[str, Any]
LEAST_FITTED = 2


def summarise(rows: Sequence[Piece], control: Piece, steps: int) -> Piece:
    """The paper's quantity, `own`, has the plain names; the same of the other losses end in theirs."""
    last, half, longest = str(steps), str(halfway(steps)), rows[-1]
    fitted = [row for row in rows if row["length"] >= LEAST_FITTED]
    lengths = [row["length"] for row in fitted]
    found: Piece = exponent(lengths, by_session(fitted, last, "own"))
    found |= {"with_floor": with_floor(lengths, by_session(fitted, last, "own")), **crossings(rows, "own")}
    for name in ("recent", "carried"):
        also = exponent(lengths, by_session(fitted, last, name)) | crossings(rows, name)
        found |= {f"{key}_{name}": value for key, value in also.items()}
    return {
        **found,
        **equal_frames(control["milestones"][half], longest["milestones"][half]),
        "losses": {name: losses(rows, last, name) for name in LOSSES},
        "own_by_step": {step: losses(rows, step, "own") for step in longest["milestones"]},
        "alpha_by_step": {step: exponent(lengths, by_session(fitted, step, "own")) for step in longest["milestones"]},
        "running_mean_of_longest": running_mean(longest["milestones"][last]["by_position"], rows),
        "history": {str(row["length"]): row["history"] for row in rows if "history" in row},
        "curves": {str(row["length"]): row["curve"] for row in rows},
        "frames_per_s": {str(row["length"]): row["frames_per_s"] for row in rows},
        "cpu_s": {f"{row['length']}x{row['batch']}": row["cpu_s"] for row in (*rows, control)},
        **{name: longest[name] for name in ("parameters", "train_actions", "skipped_files", "plan")},
        "heldout_sessions": len(longest["milestones"][last]["own"]),
        "steps": steps,
    }


def equal_frames(control: Piece, longest: Piece) -> Piece:
    """How much lower the loss of the long windows is than that of as many frames in short ones; `recent` is the headline."""
    gaps = {name: np.array(control[name]) - np.array(longest[name]) for name in LOSSES}
    return {
        "equal_frames_gap": _rounded(gaps["recent"].mean()),
        "equal_frames_gap_interval": [_rounded(value) for value in mean_interval(gaps["recent"])],
        "equal_frames_gaps": {name: _rounded(gap.mean()) for name, gap in gaps.items()},
        "equal_frames_loss": {name: _mean(control[name]) for name in LOSSES},
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


def crossings(rows: Sequence[Piece], name: str) -> Piece:
    """When the longer of two runs stays below the shorter one, measured where both ran; beyond that, extrapolated."""
    curves = {row["length"]: row["curve"] for row in rows}
    pairs = {f"{a}-{b}": (curves[a], curves[b]) for a, b in itertools.combinations(curves, 2)}
    found = {pair: crossing_s(*both, name) for pair, both in pairs.items()}
    beyond = {pair: extrapolated_crossing_s(*pairs[pair], name) for pair, at in found.items() if at is None}
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
