"""What a simulated swarm came to, for people: a table, a curve in the terminal, and a figure for a page.

Pure but for the figure, which is written to a file; matplotlib is imported only then.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from shoal.observe.charts import bar, curve
from shoal.simulation.swarm.result import SwarmResult

BAR = 24
CURVE_COLUMNS, CURVE_ROWS = 60, 6
FATES = {
    "trained": "trained",
    "no_signal": "without a signal",
    "late": "came too late",
    "lost": "lost with a worker",
    "surplus": "surplus or expired",
}
LINKS = {
    "origin_up": "origin sends",
    "relays_up": "relays send, together",
    "worker_down": "a worker receives",
    "worker_up": "a worker sends",
    "coordinator_down": "coordinator receives",
    "validators_down": "validators receive, together",
}


def simulated_table(result: SwarmResult) -> str:
    head = f"{result.name}: {result.machines} workers, {result.steps} steps"
    head += f"\n{result.stopped}" if result.stopped else ""
    ages = ", ".join(f"{age}: {share:.0%}" for age, share in result.ages.items())
    rows = [
        ("time per step", _step_times(result)),
        ("first batch after", _time(result.first_step_s)),
        ("a batch fills in", f"{_time(result.batch_s)} (first file {_time(result.first_file_s)})"),
        ("a version arrives after", _time(result.arrival_s)),
        ("age of trained groups", f"{result.mean_age:.2f} on average ({ages})" if ages else "none is trained"),
        ("trainer waits", _share(result.trainer_wait)),
        ("workers wait", _share(result.workers_wait)),
        ("validators are busy", f"{_share(result.validators_busy)}, {result.audited_share:.0%} of groups audited"),
        ("coordinator is busy", f"{_share(result.coordinator_load)}, {result.requests_per_s:,.0f} requests/s"),
        *((f"tokens {words}", _share(result.fates[name])) for name, words in FATES.items() if result.fates[name]),
        *((words, f"{result.mbytes_per_step[name]:,.1f} MB per step") for name, words in LINKS.items()),
        *_hostile(result),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [head, "", *(f"  {name:<{width}}  {value}" for name, value in rows), "", *_group_lines(result)]
    return "\n".join([*lines, "", result.sentence, result.advice])


def _step_times(result: SwarmResult) -> str:
    if math.isinf(result.step_s):
        return "none is trained after the warm-up" if result.steps else "none is trained"
    return f"{_time(result.step_s)} (slowest {_time(result.slowest_step_s)})"


def _hostile(result: SwarmResult) -> list[tuple[str, str]]:
    if not result.hostile:
        return []
    after = f", {_time(result.ban_after_s)} after their first lease" if result.ban_after_s is not None else ""
    return [
        ("hostile keys banned", f"{result.banned} of {result.hostile}{after}"),
        ("trained groups of theirs", f"{result.hostile_trained:.2%}"),
    ]


def _group_lines(result: SwarmResult) -> list[str]:
    lines = [f"  {'workers':<20}{'count':>7}{'busy':>7}{'wait for':>10}{'files/step':>12}{'of batch':>10}"]
    for group in result.groups:
        waits = ", ".join(f"{what} {share:.0%}" for what, share in sorted(group.waits.items()) if share >= 0.005)
        lines.append(
            f"  {group.name[:19]:<20}{group.count:>7}{group.busy:>7.0%}{'':>10}{group.files_per_step:>12.1f}"
            f"{group.trained_share:>10.0%}{f'  waits for {waits}' if waits else ''}"
        )
    return [line.replace(f"{'wait for':>10}", " " * 10) for line in lines]


def simulated_curve(result: SwarmResult) -> str:
    """Time between the beginnings of two steps, over the run."""
    times = [after - before for before, after in pairwise(result.formed_s)]
    if len(times) < 2:
        return ""
    top = max(times)
    points = [(float(step), seconds) for step, seconds in enumerate(times)]
    drawn = curve(points, CURVE_COLUMNS, CURVE_ROWS, x_range=(0.0, len(times) - 1.0), y_range=(0.0, top))
    return "\n".join([f"  time per step, up to {_time(top)}", *(f"  {line}" for line in drawn)])


def write_figure(results: Sequence[SwarmResult], path: Path) -> None:
    """Time per step, ages and waits of one or several swarms."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "simulated", "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 3.4), layout="constrained")
        steps, ages, waits = figure.subplots(1, 3)
        for result in results:
            times = [after - before for before, after in pairwise(result.formed_s)]
            steps.plot(range(1, len(times) + 1), times, label=result.name)
        steps.set_xlabel("step")
        steps.set_ylabel("seconds per step")
        steps.set_ylim(bottom=0)
        steps.legend(frameon=False)
        _age_bars(ages, results)
        _wait_bars(waits, results)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _age_bars(axes: Any, results: Sequence[SwarmResult]) -> None:
    for number, result in enumerate(results):
        shift = (number - (len(results) - 1) / 2) * 0.8 / len(results)
        axes.bar([age + shift for age in result.ages], list(result.ages.values()), width=0.8 / len(results))
    axes.set_xlabel("age of trained groups")
    axes.set_ylabel("share")


def _wait_bars(axes: Any, results: Sequence[SwarmResult]) -> None:
    names = ("trainer waits", "workers wait", "validators busy", "coordinator busy")
    for number, result in enumerate(results):
        values = (result.trainer_wait, result.workers_wait, result.validators_busy, result.coordinator_load)
        shift = (number - (len(results) - 1) / 2) * 0.8 / len(results)
        axes.barh([place + shift for place in range(4)], values, height=0.8 / len(results))
    axes.set_yticks(range(4), names)
    axes.set_xlabel("share of the time")
    axes.set_xlim(0, 1)


def _share(share: float) -> str:
    return f"{share:>4.0%} {bar(share, 1.0, BAR)}".rstrip()


def _time(seconds: float) -> str:
    if math.isinf(seconds):
        return "never"
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 180 else f"{seconds:.1f} s"
