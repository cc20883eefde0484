"""docs/results.md names every benchmark and every stored result; every benchmark starts."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text()
BENCHMARKS = sorted((ROOT / "benchmarks").glob("[!_]*.py"))


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda script: script.stem)
def test_the_page_names_every_benchmark(script: Path) -> None:
    is_library = "__main__" not in script.read_text()
    assert is_library or f"benchmarks/{script.name}" in PAGE


def test_the_page_links_every_stored_result() -> None:
    stored = {path.name for path in (ROOT / "docs" / "results").glob("*.json")}
    assert {name for name in stored if f"](results/{name})" not in PAGE} == set()


@pytest.mark.slow
@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda script: script.stem)
def test_every_benchmark_starts(script: Path) -> None:
    command = [sys.executable, str(script), "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
