"""`shoal curate` killed outright loses the batch that was under way, and nothing else."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.evaluation import read_answers
from support.tiny_run import save_policy

pytestmark = pytest.mark.slow
DEADLINE_S = 240


def command(model: Path, out: Path) -> list[str]:
    words = f"curate builtin:chain-sums {out} --model {model} --limit 48 --batch-tasks 4 --samples 4 --low 0"
    return [sys.executable, "-m", "shoal", *words.split(), "--max-new-tokens", "40", "--threads", "1"]


def test_a_killed_curation_goes_on_and_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    model = save_policy(tmp_path / "model", seed=0)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    out = tmp_path / "out"
    with subprocess.Popen(command(model, out), env=environment, stdout=subprocess.DEVNULL) as process:
        until = time.monotonic() + DEADLINE_S
        while len(list(out.glob("answers/batch-*.parquet"))) < 3:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < until, "no batch appeared"
            time.sleep(0.02)
        process.kill()
    done = {path: read_answers(path) for path in out.glob("answers/batch-*.parquet")}
    assert 3 <= len(done) < 12
    again = subprocess.run(
        command(model, out), env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert f"{len(done)} of 12 batches were there already" in again.stdout
    assert "kept 48 of 48 tasks" in again.stdout
    assert all(read_answers(path) == answers for path, answers in done.items())
    whole = tmp_path / "whole"
    subprocess.run(command(model, whole), env=environment, capture_output=True, timeout=DEADLINE_S, check=True)
    assert (whole / "tasks.jsonl").read_bytes() == (out / "tasks.jsonl").read_bytes()
