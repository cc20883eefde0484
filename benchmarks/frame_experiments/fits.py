"""Power laws and crossing times from the runs of `length_scaling`: least squares in log–log, intervals by a bootstrap over
sessions.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SAMPLES = 2_000
LEAST_POINTS = 4
"""Of a curve whose later half has a direction."""
FARTHEST = float(np.log(86_400.0))
"""A crossing beyond a day of one core is not a forecast."""


def power_law(lengths: Sequence[int], losses: Floats) -> tuple[float, float, float]:
    """α, A and R² of loss = A · length^−α in log–log."""
    x, y = np.log(np.asarray(lengths, float)), np.log(losses)
    slope, intercept = np.polyfit(x, y, 1)
    left = y - (slope * x + intercept)
    return float(-slope), float(np.exp(intercept)), float(1 - left.var() / y.var()) if y.var() > 0 else 0.0


def power_law_with_floor(lengths: Sequence[int], losses: Floats) -> tuple[float, float, float, float]:
    """E, α, A and R² (of the losses) for loss = E + A · length^−α; E by a search below the smallest loss."""
    best = (-np.inf, 0.0, 0.0, 0.0)
    for floor in np.linspace(0.0, 0.999 * float(losses.min()), 400):
        alpha, scale, _ = power_law(lengths, losses - floor)
        left = losses - floor - scale * np.asarray(lengths, float) ** -alpha
        best = max(best, (float(1 - left.var() / losses.var()), float(floor), alpha, scale))
    return best[1], best[2], best[3], best[0]


def alpha_interval(lengths: Sequence[int], by_session: Floats, seed: int = 0) -> tuple[float, float]:
    """95 % of α over resampled sessions; `by_session` is [lengths, sessions]."""
    rng = np.random.default_rng(seed)
    sessions = by_session.shape[1]
    alphas = [
        power_law(lengths, by_session[:, rng.integers(0, sessions, sessions)].mean(axis=1))[0] for _ in range(SAMPLES)
    ]
    return float(np.percentile(alphas, 2.5)), float(np.percentile(alphas, 97.5))


def mean_interval(values: Floats, seed: int = 0) -> tuple[float, float]:
    """95 % of the mean over resampled sessions."""
    rng = np.random.default_rng(seed)
    means = values[rng.integers(0, len(values), (SAMPLES, len(values)))].mean(axis=1)
    return float(np.percentile(means, 2.5)), float(np.percentile(means, 97.5))


Curve = Sequence[Mapping[str, float]]
"""Points with `cpu_s` and losses by name."""


def crossing_s(short: Curve, long: Curve, name: str) -> float | None:
    """CPU seconds after which the longer run's loss stays below the shorter one's while both ran; none if it does not."""
    times, gap = _gap(short, long, name)
    above = np.flatnonzero(gap >= 0)
    if not len(times) or (len(above) and above[-1] == len(times) - 1):
        return None
    return float(times[above[-1] + 1]) if len(above) else float(times[0])


def extrapolated_crossing_s(short: Curve, long: Curve, name: str) -> float | None:
    """Where lines through the later halves of both curves meet, loss against the logarithm of time; none if they do not."""
    if min(len(short), len(long)) < LEAST_POINTS:
        return None
    (a, b), (c, d) = (_late_line(curve, name) for curve in (short, long))
    if c >= a:
        return None
    exponent = (d - b) / (a - c)
    after = min(short[-1]["cpu_s"], long[-1]["cpu_s"])
    return round(float(np.exp(exponent)), 1) if np.log(after) < exponent < FARTHEST else None


def _late_line(curve: Curve, name: str) -> tuple[float, float]:
    late = curve[len(curve) // 2 :]
    slope, offset = np.polyfit(np.log([point["cpu_s"] for point in late]), [point[name] for point in late], 1)
    return float(slope), float(offset)


def _gap(short: Curve, long: Curve, name: str) -> tuple[Floats, Floats]:
    a_times, a_losses = (np.array([point[key] for point in short]) for key in ("cpu_s", name))
    b_times, b_losses = (np.array([point[key] for point in long]) for key in ("cpu_s", name))
    end = min(a_times[-1], b_times[-1])
    times = np.unique(np.concatenate([a_times, b_times]))
    times = times[(times >= max(a_times[0], b_times[0])) & (times <= end)]
    return times, np.interp(times, b_times, b_losses) - np.interp(times, a_times, a_losses)
