"""A real Ray cluster on this machine gives the same answers as one process."""

import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.config import TasksConfig
from shoal.evaluation import EngineSpec, SamplingSettings, answer_tasks, make_executor
from shoal.tasks import load_tasks
from support.tiny_run import Reports

pytestmark = pytest.mark.slow
START_S = 240
OPTIONS = ("--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000")


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray = str(Path(sysconfig.get_path("scripts")) / "ray")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    head = subprocess.Popen(
        [ray, "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=2", *OPTIONS],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert head.stdout is not None
    try:
        lines = []
        for line in head.stdout:
            lines.append(line)
            if "Ray runtime started" in line:
                break
        else:
            pytest.fail("".join(lines))
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(START_S)


def test_actors_give_the_same_answers_as_one_process(cluster: str, tiny_policy: Path, tmp_path: Path) -> None:
    tasks = list(load_tasks(TasksConfig(count=1, heldout=6)).heldout)
    spec = EngineSpec(str(tiny_policy), "torch", SamplingSettings(samples=2, max_new_tokens=8), threads=1)
    alone = answer_tasks(tasks, spec, make_executor(spec, count=1), tmp_path / "alone", Reports(), batch_tasks=2)
    executor = make_executor(spec, count=2, ray_address=cluster)
    reports = Reports()
    spread = answer_tasks(tasks, spec, executor, tmp_path / "ray", reports, batch_tasks=2)
    assert list(spread.answers()) == list(alone.answers())
    assert reports.some("batch 3/3")
