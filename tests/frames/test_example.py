"""The example of a frame policy in a swarm: what its command refuses, and when it says that success rose."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.config import load_config

ROOT = Path(__file__).parents[2]
EXAMPLE = runpy.run_path(str(ROOT / "examples/recurrence/run.py"))
RUN_FILE, SMOKE, rise_interval, rises = (EXAMPLE[name] for name in ("RUN_FILE", "SMOKE", "rise_interval", "rises"))


@pytest.mark.parametrize(("end", "excludes_zero"), [(0.62, False), (0.66, True), (0.52, False)])
def test_the_interval_of_a_rise_excludes_zero_if_it_is_beyond_chance(end: float, excludes_zero: bool) -> None:
    found = rise_interval({"heldout_start": 0.6, "heldout_end": end, "heldout_tasks": 1024})
    assert found is not None
    assert found[0] < end - 0.6 < found[1]
    assert (found[0] > 0) == excludes_zero


def test_a_run_without_evaluations_has_no_rise() -> None:
    found = {"heldout_start": None, "heldout_end": None, "heldout_tasks": 64}
    assert rise_interval(found) is None
    assert not rises(found)


def test_the_smallest_rise_that_is_asked_for_is_beyond_chance() -> None:
    config = load_config(RUN_FILE)
    found = rise_interval({"heldout_start": 0.45, "heldout_end": 0.55, "heldout_tasks": config.tasks.heldout})
    assert found is not None
    assert found[0] > 0


def test_the_smoke_run_is_a_run() -> None:
    assert load_config(RUN_FILE, SMOKE).run.steps == 3


@pytest.mark.parametrize("wrong", [["--run.steps", "many"], ["--nonsense", "1"]])
def test_a_setting_that_does_not_exist_is_refused_in_one_sentence(wrong: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "examples/recurrence/run.py", *wrong],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.decode().startswith("run.py: ")
    assert len(done.stderr.decode().splitlines()) == 1
