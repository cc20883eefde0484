"""The report of a run: one HTML file that needs nothing else, with plots, workers, bans and settings.

It loads nothing from anywhere (its own policy forbids it), follows dark mode and reads on a phone. Everything that came from
outside is escaped by the template.
"""

from collections.abc import Callable, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from shoal import __version__
from shoal.metrics.units import size
from shoal.observe import plots
from shoal.observe.summary import Summary, headline
from shoal.observe.words import count, duration, plural, printable
from shoal.protocol.api import HistoryView, StatusView

Plot = Callable[[StatusView, HistoryView], str | None]

PLOTS: tuple[tuple[str, str, Plot], ...] = (
    ("Learning", "Mean reward of each step's batch, and accuracy on tasks that training never uses.", plots.learning),
    ("Time per phase", "What the trainer did with the time of each step.", plots.phase_times),
    ("Age of trained groups", "How many versions behind the trainer the policy was that wrote them.", plots.ages),
    (
        "Solve rates of tasks",
        "Over all samples of the run; tasks never or always solved give no signal.",
        plots.task_solve_rates,
    ),
    ("Verdicts per worker", "Submissions that a validator checked.", plots.verdicts),
    ("Bytes per version", "What one client downloads to follow the policy.", plots.version_bytes),
    ("Completion length", "Mean length of the trained completions.", plots.completion_length),
    ("Entropy", "Mean entropy of the policy over trained tokens.", plots.entropy),
    ("Gradient norm", "Mean over the optimiser steps of each training step.", plots.gradient_norm),
)


def render_report(
    summary: Summary,
    status: StatusView,
    history: HistoryView,
    *,
    title: str = "Shoal run",
    problems: Sequence[str] = (),
    settings_toml: str = "",
) -> str:
    """The page. `problems` are the sentences of `failures`."""
    drawn = [(name, caption, plot(status, history)) for name, caption, plot in PLOTS]
    return (
        _environment()
        .get_template("report.html")
        .render(
            title=title,
            version=__version__,
            headline=headline(summary),
            problems=problems,
            metrics=key_metrics(summary, history),
            plots=[(name, caption, Markup(svg)) for name, caption, svg in drawn if svg is not None],
            workers=status.workers,
            relays=status.relays,
            summary=summary,
            status=status,
            settings_toml=settings_toml,
        )
    )


def key_metrics(summary: Summary, history: HistoryView) -> list[tuple[str, str, str]]:
    """Name, value and remark of the metrics that a reader looks for first."""
    problems = history.evaluations[-1].problems if history.evaluations else 0
    cheaters = summary["cheaters"]
    return [
        (
            "Held-out accuracy",
            f"{_share(summary['heldout_start'])} → {_share(summary['heldout_end'])}",
            f"{problems} tasks",
        ),
        ("Steps", f"{summary['steps']}", f"in {duration(summary['wall_s'])}"),
        *([("Cheaters banned", f"{summary['cheaters_banned']} of {cheaters}", "")] if cheaters else []),
        ("Honest rejections", f"{summary['honest_rejected']}", plural(summary["honest_workers"], "honest worker")),
        ("Oldest group", plural(summary["max_staleness"], "version"), f"limit {summary['async_level']}"),
        (
            "Weights",
            size(summary["bytes_published"]),
            f"{size(summary['bytes_sent_by_relays'])} relayed" + _saving(summary["delta_ratio"]),
        ),
        ("Ledger", "verified" if summary["ledger_ok"] else "broken", ""),
    ]


def _saving(ratio: float | None) -> str:
    return "" if ratio is None else f", deltas {ratio:.0f}x smaller than the whole"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _metric(value: float | int | None) -> str:
    """Up to three digits after the point, and a dash for what is not known."""
    if value is None:
        return "–"
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("shoal.observe", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "count": count, "duration": duration, "metric": _metric, "printable": printable, "size": size,
    }  # fmt: skip
    return environment
