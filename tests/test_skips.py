"""A skipped test of the fast suite fails in CI; elsewhere, and in the slow suite, it is skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SKIPPED = """
import pytest

@pytest.mark.{mark}
@pytest.mark.skipif(True, reason="run `make system`")
def test_one(): ...
"""


@pytest.mark.parametrize(
    ("ci", "mark", "fails"), [("true", "fast", True), ("", "fast", False), ("true", "slow", False)]
)
def test_a_skip_fails_in_the_fast_suite_of_ci_only(tmp_path: Path, ci: str, mark: str, fails: bool) -> None:
    (tmp_path / "test_skipped.py").write_text(SKIPPED.format(mark=mark))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  fast\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(tmp_path),
    ]
    environment = os.environ | {"CI": ci, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == int(fails), done.stdout + done.stderr
    assert ("1 skipped" in done.stdout) != fails
    assert ("which CI does not allow" in done.stdout and "run `make system`" in done.stdout) == fails
