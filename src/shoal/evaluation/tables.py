"""Metrics and comparisons as text for a terminal or a page of Markdown, and as JSON. Pure."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shoal.evaluation.comparison import Comparison
from shoal.evaluation.metrics import AnswerMetrics
from shoal.evaluation.statistics import Estimate


def metrics_table(metrics: Sequence[AnswerMetrics]) -> str:
    """One line per category; each metric with its 95 % interval."""
    samples = metrics[0].answers // metrics[0].problems
    head = ["category", "problems", f"avg@{samples}", *(f"pass@{k}" for k in metrics[0].pass_at), "tokens", "truncated"]
    rows = [
        [
            row.category,
            str(row.problems),
            str(row.avg),
            *(str(value) for value in row.pass_at.values()),
            f"{row.mean_tokens:.1f}",
            f"{row.truncated:.1%}",
        ]
        for row in metrics
    ]
    return markdown_table(head, rows)


def comparison_table(comparisons: Sequence[Comparison], first: str, second: str) -> str:
    head = ["category", "problems", first, second, "difference (95 %)", "better / worse", "p"]
    rows = [
        [
            row.category,
            str(row.problems),
            f"{row.first:.3f}",
            f"{row.second:.3f}",
            f"{row.difference:+.3f} [{row.low:+.3f}, {row.high:+.3f}]",
            f"{row.better} / {row.worse}",
            f"{row.p_value:.4f}",
        ]
        for row in comparisons
    ]
    return markdown_table(head, rows)


def metrics_json(metrics: Sequence[AnswerMetrics]) -> list[dict[str, Any]]:
    return [
        {
            "category": row.category,
            "problems": row.problems,
            "answers": row.answers,
            "avg": _estimate(row.avg),
            "pass_at": {str(k): _estimate(value) for k, value in row.pass_at.items()},
            "mean_tokens": round(row.mean_tokens, 3),
            "truncated": round(row.truncated, 6),
        }
        for row in metrics
    ]


def comparison_json(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    return [asdict(row) for row in comparisons]


def _estimate(value: Estimate) -> dict[str, float]:
    return {name: round(number, 6) for name, number in asdict(value).items()}


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned for reading, valid Markdown; a bar inside a name is escaped."""
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (head, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    ruled = [lines[0], ["-" * width for width in widths], *lines[1:]]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in ruled
    )


def histogram_lines(counts: dict[str, int], *, width: int = 40) -> list[str]:
    """One bar per entry."""
    most = max([1, *counts.values()])
    label = max(len(name) for name in counts)
    return [f"{name:>{label}} {'█' * round(width * count / most)} {count}" for name, count in counts.items()]
