"""docs/verification.md says what the code does; `python tests/validation/test_documentation.py` rewrites its tables."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.protocol.verdicts import REASONS
from shoal.validation import load_calibration

PAGE = Path(__file__).parents[2] / "docs" / "verification.md"
RESULTS = PAGE.parent / "results"
DETECTION = RESULTS / "detection.json"


def reason_table() -> str:
    rows = [f"| `{reason}` | {weight} | {meaning} |" for reason, (weight, meaning) in REASONS.items()]
    return "\n".join(["| reason | weight | meaning |", "|---|---|---|", *rows])


def residual_table() -> str:
    rows = [
        f"| `{name}` | {known.limits.flips_per_1000:.2f} | {known.limits.flip_margin_mean:.4f}"
        f" | {known.evidence.residual_bits_per_1000_tokens:.2f} |"
        for name, known in load_calibration("bundled").classes.items()
    ]
    return "\n".join(["| numerics class | λ per 1,000 | μ | bits per 1,000 tokens |", "|---|---|---|---|", *rows])


def detection_table() -> str:
    """One row per kind of worker, from the run whose figures are kept."""
    figures = json.loads(DETECTION.read_text())
    honest = (
        f"| honest, float32 and bfloat16 | {figures['honest_submissions']} | {figures['honest_rejected']} rejected"
        " | | | | |"
    )
    cheats = figures["cheats"] | figures["slow_cheats"]
    rows = [detection_row(name, cheat, slow=name in figures["slow_cheats"]) for name, cheat in cheats.items()]
    titles = ["worker", "trials", "missed", "found by", "tokens needed", "submissions until the ban", "95 % within"]
    return "\n".join([f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", honest, *rows])


def detection_row(name: str, cheat: dict[str, Any], *, slow: bool) -> str:
    ban = cheat["submissions_until_ban_at_floor"]
    until = f"{ban:g}" if ban else f"unused after {cheat['submissions_until_unused_at_floor']:g}, no ban"
    worst = cheat["submissions_until_ban_at_floor_worst95"] or ""
    needed = f"{cheat['tokens_needed']:,}" if cheat["tokens_needed"] else ""
    kind = f"{name} (slow)" if slow else name
    return f"| {kind} | {cheat['trials']} | {cheat['missed']} | `{cheat['stage']}` | {needed} | {until} | {worst} |"


def cost_table() -> str:
    audit = json.loads((RESULTS / "audit_cost.json").read_text())
    hot = audit["hot"]
    build = json.loads((RESULTS / "commitments.json").read_text())
    rows = [
        f"| full audit, CPU seconds of the validator ÷ worker | {audit['full_audit']} |",
        f"| at the audit floor of 10 % | {audit['at_floor']} |",
        f"| the same two at temperature 2, where hardly two samples agree | {hot['full_audit']}, {hot['at_floor']} |",
        f"| re-scoring of rewards, apart | {audit['rescoring']} |",
        *(
            f"| {what}, {width} wide: times as fast as `toploc` 0.1.6 | {build[f'{name}_speedup_{width}']:.1f} |"
            for name, what in (("build", "building commitments"), ("verify", "verifying them"))
            for width in (576, 5120)
        ),
    ]
    return "\n".join(["| what | measured |", "|---|---|", *rows])


TABLES = {"reasons": reason_table, "residual": residual_table, "costs": cost_table, "detection": detection_table}


def section(text: str, name: str) -> tuple[str, str, str]:
    before, _, rest = text.partition(f"<!-- {name} -->\n")
    inside, mark, after = rest.partition(f"<!-- /{name} -->")
    assert mark, f"docs/verification.md has no table {name}"
    return before, inside, after


@pytest.mark.parametrize("name", TABLES)
def test_the_page_shows_the_tables_of_the_code(name: str) -> None:
    inside = section(PAGE.read_text(), name)[1]
    assert inside.strip() == TABLES[name](), f"run `python {Path(__file__).name}` to bring the page up to date"


def rewrite() -> None:
    for name, table in TABLES.items():
        before, _, after = section(PAGE.read_text(), name)
        PAGE.write_text(f"{before}<!-- {name} -->\n{table()}\n<!-- /{name} -->{after}")


if __name__ == "__main__":
    rewrite()
