"""docs/design/failures.md names tests that exist; the numbers of the chaos run are those of the stored run."""

import json
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
ENTRY = re.compile(r"^- \*\*(.+?)\*\*:(.*?)(?=^- \*\*|^## |\Z)", re.MULTILINE | re.DOTALL)


def test_every_failure_names_tests_that_exist() -> None:
    known = {
        name for path in TESTS.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    page = (DOCS / "design" / "failures.md").read_text()
    entries = ENTRY.findall(page)
    assert len(entries) >= 25
    for failure, text in entries:
        named = re.findall(r"`(test_\w+)`", text)
        assert named, failure
        assert set(named) <= known, f"{failure}: {set(named) - known}"
    assert set(re.findall(r"`(test_\w+)`", page)) <= known


def test_the_numbers_of_the_hundred_kills_are_those_of_the_stored_run() -> None:
    stored = json.loads((DOCS / "results" / "chaos.json").read_text())
    text = " ".join((DOCS / "results.md").read_text().partition("## Chaos")[2].split())
    faults = sum(stored["faults"].values())
    assert (stored["kills"], stored["violations"], stored["violated"]) == (100, 0, [])
    assert f"{stored['kills']} kills, {stored['steps']} steps, 0 violations, {faults:,} faults" in text
    assert f"in {stored['requests']:,} requests, in {stored['wall_s'] / 60:.0f} minutes" in text
