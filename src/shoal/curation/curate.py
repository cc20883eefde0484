"""From a raw task set to one that teaches: duplicates and contamination out, k samples per task, a band of solve rates kept.

What can be dropped without the model is dropped first. Sampling goes through a journal, so a killed run goes on where it was. The
output directory holds `tasks.jsonl` (kept, with their solve rates), `dropped.jsonl` (each with its reason) and `curation.json`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.curation.band import Band, histogram, solve_rates
from shoal.curation.overlap import CONTAMINATION_WORDS, Contamination, NearDuplicates
from shoal.errors import ConfigError
from shoal.evaluation.answering import answer_tasks
from shoal.evaluation.executors import EngineSpec, Executor
from shoal.evaluation.tables import histogram_lines
from shoal.files import write_atomic
from shoal.metrics import Report
from shoal.tasks import Task

TASKS_FILE, DROPPED_FILE, SUMMARY_FILE = "tasks.jsonl", "dropped.jsonl", "curation.json"
DEFAULT_BAND = Band()
DUPLICATE, CONTAMINATED = "duplicate", "contaminated"


@dataclass(frozen=True)
class CurationSettings:
    band: Band = DEFAULT_BAND
    similarity: float = 1.0
    """Prompts at least this similar are duplicates; 1 means equal but for case, punctuation and spacing."""
    contamination_words: int = CONTAMINATION_WORDS
    """Words in a row that a task must not share with an evaluation task."""


@dataclass(frozen=True)
class Decision:
    task: Task
    reason: str = ""
    """Why it was dropped; empty if it was kept."""
    solve_rate: float | None = None


def sieve(tasks: Iterable[Task], evaluation: Iterable[Task], settings: CurationSettings) -> list[Decision]:
    """What the texts alone decide. The first of several duplicates stays."""
    unseen = Contamination((task.prompt for task in evaluation), settings.contamination_words)
    duplicates = NearDuplicates(settings.similarity)
    return [Decision(task, _text_reason(task, unseen, duplicates)) for task in tasks]


def _text_reason(task: Task, unseen: Contamination, duplicates: NearDuplicates) -> str:
    if unseen.touches(task.prompt):
        return CONTAMINATED
    return DUPLICATE if duplicates.seen(task.prompt) else ""


def apply_band(decisions: Iterable[Decision], rates: dict[str, float], band: Band) -> list[Decision]:
    """Adds solve rates, and drops what lies outside of the band."""
    return [
        decision
        if decision.reason
        else replace(
            decision,
            solve_rate=rates[decision.task.problem_id],
            reason=band.refusal(rates[decision.task.problem_id]),
        )
        for decision in decisions
    ]


def curate(
    tasks: Sequence[Task],
    evaluation: Sequence[Task],
    spec: EngineSpec,
    executor: Executor,
    output: Path,
    report: Report,
    *,
    settings: CurationSettings | None = None,
    batch_tasks: int = 32,
) -> dict[str, Any]:
    """Runs the whole of it; returns the summary that it wrote."""
    settings = settings or CurationSettings()
    sieved = sieve(tasks, evaluation, settings)
    candidates = [decision.task for decision in sieved if not decision.reason]
    report(f"{len(tasks)} tasks, {len(candidates)} after duplicates and contamination")
    if not candidates:
        raise ConfigError("No task is left to sample.", hint="Is the evaluation set the same as the task set?")
    journal = answer_tasks(candidates, spec, executor, output / "answers", report, batch_tasks=batch_tasks)
    decisions = apply_band(sieved, solve_rates(journal.answers()), settings.band)
    summary = summarise(decisions, spec, settings)
    write_output(output, decisions, summary)
    report_summary(summary, output, report)
    return summary


def summarise(decisions: Sequence[Decision], spec: EngineSpec, settings: CurationSettings) -> dict[str, Any]:
    rates = [decision.solve_rate for decision in decisions if decision.solve_rate is not None]
    reasons = Counter(decision.reason for decision in decisions if decision.reason)
    return {
        "tasks": len(decisions),
        "kept": sum(not decision.reason for decision in decisions),
        "dropped": dict(sorted(reasons.items())),
        "mean_solve_rate": round(sum(rates) / len(rates), 6),
        "histogram": histogram(rates, spec.settings.samples),
        "model": spec.model,
        "engine": spec.engine,
        "sampling": asdict(spec.settings),
        "settings": asdict(settings),
    }


def write_output(output: Path, decisions: Sequence[Decision], summary: dict[str, Any]) -> None:
    """The summary last: where it exists, the rest is complete."""
    kept = [
        decision.task.model_copy(update={"solve_rate": decision.solve_rate})
        for decision in decisions
        if not decision.reason
    ]
    dropped = [
        {"problem_id": decision.task.problem_id, "reason": decision.reason, "solve_rate": decision.solve_rate}
        for decision in decisions
        if decision.reason
    ]
    write_atomic(output / TASKS_FILE, _lines(kept, Task.model_dump_json))
    write_atomic(output / DROPPED_FILE, _lines(dropped, json.dumps))
    write_atomic(output / SUMMARY_FILE, json.dumps(summary, indent=2).encode() + b"\n")


def report_summary(summary: dict[str, Any], output: Path, report: Report) -> None:
    report("tasks by solved samples:")
    for line in histogram_lines(summary["histogram"]):
        report(f"  {line}")
    dropped = ", ".join(f"{count} {reason}" for reason, count in summary["dropped"].items()) or "none"
    report(f"kept {summary['kept']} of {summary['tasks']} tasks in {output / TASKS_FILE}; dropped: {dropped}")


def _lines(rows: Iterable[Any], dump: Callable[[Any], str]) -> bytes:
    return b"".join(dump(row).encode() + b"\n" for row in rows)
