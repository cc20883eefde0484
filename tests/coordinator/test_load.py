"""A small turn of the load benchmark: what was answered survives SIGKILL, and no slot is given twice."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HAS_HISTORY = shutil.which("git") is not None and (Path(__file__).parents[2] / ".git").exists()
ROOT = Path(__file__).parents[2]
PATIENCE_S = 600


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed: run `make system`")
def test_whatever_a_loaded_coordinator_has_answered_survives_its_kill() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "coordinator_load.py"), "--part", "dense"]
    command += ["--workers", "200", "--requests", "2400"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-2000:]
    metrics = json.loads(done.stdout.splitlines()[-1])
    assert metrics["requests_dense"] == 2400
    assert [metrics[f"{name}_dense"] for name in ("refused", "lost_leases", "lost_submissions")] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_HISTORY, reason="needs a clone")
def test_the_cost_of_a_request_is_compared_with_another_revision() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "request_cost.py"), "--against", "HEAD"]
    command += ["--rounds", "1", "--workers", "20", "--turns", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-2000:]
    metrics = json.loads(done.stdout.splitlines()[-1])
    assert metrics["requests"] == 200
    assert metrics["ratio"] > 0
