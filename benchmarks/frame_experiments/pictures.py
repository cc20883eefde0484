"""Plots of `benchmarks/recurrence.py`: accuracy by position, loss against length and over time, success over versions."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, StrMethodFormatter

SIZE_IN = (10.0, 3.6)
DPI = 110


def draw_critical(result: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=SIZE_IN, layout="constrained")
    for axes, (task, rows) in zip(figure.subplots(1, 2), result["tasks"].items(), strict=True):
        for model, accuracy in rows["by_position"].items():
            axes.plot(range(1, len(accuracy) + 1), accuracy, label=model.replace("_", " "), linewidth=1.2)
        axes.axhline(rows["floor"], color="grey", linestyle=":", linewidth=1)
        axes.axvline(64, color="grey", linestyle="--", linewidth=0.8)
        axes.set(
            title=f"{task}: dashed = trained length, dotted = floor",
            xlabel="position",
            ylabel="accuracy",
            ylim=(0, 1.02),
        )
        axes.set_xscale("log", base=2)
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=DPI)


def draw_length(result: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=SIZE_IN, layout="constrained")
    by_length, over_time = figure.subplots(1, 2)
    shown = {
        "windows of the own length": result["losses"]["own"],
        "half of it to all of it as history": result["losses"]["recent"],
        "run of 128, its first positions": result["running_mean_of_longest"],
    }
    for label, losses in shown.items():
        by_length.plot([int(at) for at in losses], list(losses.values()), "o-", label=label, linewidth=1.2)
    by_length.set_xscale("log", base=2)
    by_length.set_yscale("log")
    by_length.yaxis.set_major_locator(MaxNLocator(6))
    for set_formatter in (by_length.yaxis.set_major_formatter, by_length.xaxis.set_major_formatter):
        set_formatter(StrMethodFormatter("{x:g}"))
    by_length.yaxis.set_minor_locator(NullLocator())
    by_length.set(title=f"α = {result['alpha']}, R² = {result['r2']}", xlabel="trained length", ylabel="held-out loss")
    by_length.legend(fontsize=8)
    for length, curve in result["curves"].items():
        times, losses = ([point[name] for point in curve] for name in ("cpu_s", "own"))
        over_time.plot(times, losses, label=length, linewidth=1.2)
    over_time.set(title="windows of the own length", xlabel="CPU seconds", ylabel="held-out loss")
    over_time.set_xscale("log")
    over_time.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=DPI)


def draw_swarm(result: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(SIZE_IN[0] / 2, SIZE_IN[1]), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["version"] for row in result["curve"]], [row["accuracy"] for row in result["curve"]], "o-")
    axes.set(title="held-out success after a warm start", xlabel="policy version", ylabel="success", ylim=(0, 1))
    figure.savefig(path, dpi=DPI)


DRAW = {"critical": draw_critical, "length": draw_length, "swarm": draw_swarm}
