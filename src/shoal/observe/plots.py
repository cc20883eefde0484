"""Plots of a run as inline SVG, drawn by matplotlib, which is imported only when one is drawn.

Each function takes history or status and returns an SVG element, or nothing when there is nothing to show. Lines and letters
take the colour of the page around them, so that the plots follow dark mode. Text is never read as markup or formulas.
"""

import io
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from shoal.observe import series
from shoal.observe.series import Point
from shoal.observe.words import printable
from shoal.protocol.api import HistoryView, StatusView, WorkerView

Axes = Any
INK = "#010203"
"""Stands for the text colour of the page until the SVG is written."""
BLUE, GREEN, ORANGE, RED, PURPLE, TEAL, GREY = (
    "#4c8df6",
    "#2fa36b",
    "#e08a3c",
    "#dc5050",
    "#9273d8",
    "#2aa5a5",
    "#8a94a6",
)
PHASE_COLOURS = (GREY, TEAL, PURPLE, BLUE, ORANGE, GREEN, RED)
WIDTH_IN, HEIGHT_IN = 4.5, 2.5
MAX_WORKERS = 20

STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


def draw(name: str, paint: Callable[[Axes], None], *, height_in: float = HEIGHT_IN) -> str:
    """An SVG element that a page can hold; the same data gives the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        axes = figure.subplots()
        paint(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue(), name)


def _inline(document: str, name: str) -> str:
    element = re.sub(r"<metadata>.*?</metadata>", "", document[document.index("<svg") :], flags=re.DOTALL)
    element = re.sub(r'<style type="text/css">.*?</style>', "", element, flags=re.DOTALL)
    return element.replace(INK, "currentColor").replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)


def learning(status: StatusView, history: HistoryView) -> str | None:
    reward = series.metric_curve(history, series.REWARD)
    heldout = series.heldout_curve(history)
    if not reward and not heldout:
        return None

    def paint(axes: Axes) -> None:
        _line(axes, reward, BLUE, "reward")
        _line(axes, heldout, GREEN, "held-out accuracy", marker="o")
        for number, step in enumerate(_ban_steps(history)):
            axes.axvline(step, color=RED, linestyle=":", linewidth=1.2, label="" if number else "a worker banned")
        axes.set_ylim(min(0.0, *(y for _, y in reward), 0.0), max(1.02, *(y for _, y in reward), 1.02))
        _step_axis(axes)
        _legend_above(axes)

    return draw("reward and held-out accuracy per step", paint)


def ages(status: StatusView, history: HistoryView) -> str | None:
    histogram = dict(sorted(status.age_histogram.items()))
    if not histogram:
        return None

    def paint(axes: Axes) -> None:
        bars = axes.bar(list(histogram), list(histogram.values()), width=0.7, color=BLUE)
        axes.bar_label(bars, padding=2, fontsize=8.5)
        axes.axvline(status.async_level + 0.5, color=RED, linestyle=":", linewidth=1.2, label="limit")
        axes.set_xticks(range(max(*histogram, status.async_level) + 1))
        axes.margins(y=0.14)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("step − policy version")
        axes.set_ylabel("groups")
        _legend_above(axes)

    return draw("age of trained groups", paint)


def task_solve_rates(status: StatusView, history: HistoryView) -> str | None:
    counts = history.tasks.by_solve_rate
    if not counts:
        return None

    def paint(axes: Axes) -> None:
        bars = axes.bar(list(counts), list(counts.values()), width=0.7, color=BLUE)
        axes.bar_label(bars, padding=2, fontsize=8.5)
        axes.tick_params(axis="x", labelrotation=30, labelsize=8)
        axes.margins(y=0.14)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("solved samples")
        axes.set_ylabel("tasks")

    return draw("tasks by how often they were solved", paint)


def phase_times(status: StatusView, history: HistoryView) -> str | None:
    made = [version for version in history.versions if version.version > 0]
    table = series.phase_table(made)
    if not table:
        return None

    def paint(axes: Axes) -> None:
        edges = _edges([version.version - 1 for version in made])
        baseline = [0.0] * len(made)
        for number, (name, seconds) in enumerate(table.items()):
            top = [low + extra for low, extra in zip(baseline, seconds, strict=True)]
            colour = PHASE_COLOURS[number % len(PHASE_COLOURS)]
            axes.stairs(top, edges, baseline=baseline, fill=True, color=colour, label=name.replace("_", " "))
            baseline = top
        axes.set_ylabel("seconds")
        _step_axis(axes)
        _legend_above(axes, columns=3)

    return draw("time per phase and step", paint, height_in=HEIGHT_IN + 0.15 * (len(table) // 3))


def version_bytes(status: StatusView, history: HistoryView) -> str | None:
    points = series.bytes_curve(history)
    if not points:
        return None

    def paint(axes: Axes) -> None:
        megabytes = [amount / 1e6 for _, amount in points]
        axes.stairs(megabytes, _edges([version for version, _ in points]), fill=True, color=TEAL)
        axes.set_ylabel("MB")
        _step_axis(axes, "version")

    return draw("bytes per version", paint)


def completion_length(status: StatusView, history: HistoryView) -> str | None:
    return _metric(history, series.LENGTH, "tokens", "completion length", PURPLE)


def entropy(status: StatusView, history: HistoryView) -> str | None:
    return _metric(history, series.ENTROPY, "nats per token", "entropy", ORANGE)


def gradient_norm(status: StatusView, history: HistoryView) -> str | None:
    return _metric(history, series.GRADIENT_NORM, "norm before clipping", "gradient norm", GREY)


def verdicts(status: StatusView, history: HistoryView) -> str | None:
    workers = _most_checked(status.workers)
    if not workers:
        return None

    def paint(axes: Axes) -> None:
        rows = range(len(workers))
        accepted = [worker.submissions_accepted for worker in workers]
        rejected = [worker.submissions_rejected for worker in workers]
        axes.barh(rows, accepted, color=GREEN, height=0.65, label="accepted")
        axes.barh(rows, rejected, left=accepted, color=RED, height=0.65, label="rejected")
        axes.set_yticks(rows, [printable(worker.name, 18) for worker in workers])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlim(0, 1.05 * max(map(sum, zip(accepted, rejected, strict=True))))
        axes.set_xlabel("submissions")
        _legend_above(axes)

    return draw("verdicts per worker", paint, height_in=max(HEIGHT_IN, 1.1 + 0.24 * len(workers)))


def _metric(history: HistoryView, names: Sequence[str], unit: str, name: str, colour: str) -> str | None:
    points = series.metric_curve(history, names)
    if not points:
        return None

    def paint(axes: Axes) -> None:
        _line(axes, points, colour, name)
        axes.set_ylim(bottom=min(0.0, *(y for _, y in points), 0.0))
        axes.set_ylabel(unit)
        _step_axis(axes)

    return draw(name, paint)


def _line(axes: Axes, points: Sequence[Point], colour: str, label: str, marker: str = "") -> None:
    if points:
        single = marker or ("o" if len(points) == 1 else "")
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=colour, label=label, marker=single, markersize=3.5)


def _step_axis(axes: Axes, name: str = "step") -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.margins(x=0.02)
    axes.set_xlabel(name)


def _legend_above(axes: Axes, columns: int = 4) -> None:
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2, handlelength=1.2, columnspacing=1.2
    )


def _edges(numbers: Sequence[float]) -> list[float]:
    """Borders between neighbouring bars."""
    middles = [(left + right) / 2 for left, right in pairwise(numbers)]
    return [numbers[0] - 0.5, *middles, numbers[-1] + 0.5]


def _ban_steps(history: HistoryView) -> list[int]:
    """How many steps had been trained when each worker was banned."""
    times = [version.published_s for version in history.versions if version.version > 0]
    return sorted({sum(at_s <= (worker.banned_at_s or 0.0) for at_s in times) for worker in history.bans})


def _most_checked(workers: Sequence[WorkerView]) -> list[WorkerView]:
    checked = [worker for worker in workers if worker.submissions_accepted + worker.submissions_rejected]
    busiest = sorted(checked, key=lambda worker: -(worker.submissions_accepted + worker.submissions_rejected))
    kept = {worker.key for worker in busiest[:MAX_WORKERS]}
    return [worker for worker in checked if worker.key in kept]
