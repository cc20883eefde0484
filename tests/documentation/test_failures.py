"""docs/design/failures.md: every line names tests that exist; its numbers are those of the stored run."""

import json
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "design" / "failures.md").read_text()
SECTION = PAGE.partition("## What survives what")[2].partition("\n## ")[0]


def test_every_line_of_what_survives_names_tests_that_exist() -> None:
    known = {
        name for path in TESTS.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    rows = [row for row in re.findall(r"^\| .*\|$", SECTION, re.M) if not row.startswith("| who ")]
    assert len(rows) >= 25
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.split("|")[3])
        assert named, row
        assert set(named) <= known, row


def test_the_figures_of_the_hundred_kills_are_those_of_the_stored_run() -> None:
    figures = json.loads((TESTS.parent / "docs" / "results" / "chaos.json").read_text())
    faults = sum(figures["faults"].values())
    assert (figures["kills"], figures["violations"], figures["violated"]) == (100, 0, [])
    assert f"{figures['kills']} kills, {figures['steps']} steps, 0 violations, {faults:,} faults" in SECTION
    assert f"in {figures['requests']:,} requests, in {figures['wall_s'] / 60:.0f} minutes" in SECTION
