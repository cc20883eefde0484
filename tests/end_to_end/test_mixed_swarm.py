"""Engines of two kinds in one swarm: each validates what the other made. `make test-vllm` runs these in vLLM's own environment."""

import importlib.util
import json
from pathlib import Path

import pytest

from end_to_end.swarm import Swarm, small_config, swarm, worker_named
from shoal.protocol.api import StatusView

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM has its own environment: make test-vllm"),
]
CLASSES = ("torch/float32/cpu", "vllm/float32/cpu")
STEPS = 60
"""More than one worker does while the other starts."""


def add_vllm_validator(run: Swarm) -> None:
    arguments = ("validate", str(run.directory.run_file), "--threads", "1", "--engine", "vllm")
    run.supervisor.add(run.processes.role("validator-vllm", *arguments))


def has_accepted_work(status: StatusView, *names: str) -> bool:
    workers = [worker_named(status, name) for name in names]
    return all(worker is not None and worker.submissions_accepted > 0 for worker in workers)


def test_a_vllm_and_an_embedded_worker_train_one_policy(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", steps=STEPS, validation={"numerics_classes": CLASSES})
    with swarm(config) as run:
        run.add_owner_roles("coordinator", "trainer", "relay-1", "validator")
        run.add_worker("on-vllm", engine="vllm")
        run.until("vLLM's joining", lambda status: worker_named(status, "on-vllm") is not None)
        run.add_worker("embedded")
        status = run.until(
            "accepted work of both, and versions made of it",
            lambda status: status.newest_version >= 2 and has_accepted_work(status, "on-vllm", "embedded"),
        )
        assert [worker.submissions_rejected for worker in status.workers] == [0, 0]
        joined = [json.loads(entry.body) for entry in run.ledger() if entry.kind == "registered"]
        assert {body["numerics_class"] for body in joined} == set(CLASSES)


def test_a_validator_on_vllm_judges_embedded_work_and_sees_a_stale_cheater_on_vllm(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", steps=STEPS, validation={"numerics_classes": CLASSES})
    with swarm(config) as run:
        run.add_owner_roles("coordinator", "trainer", "relay-1")
        add_vllm_validator(run)
        run.add_worker("cheater", cheat="stale", engine="vllm")
        run.until("the cheater's joining", lambda status: worker_named(status, "cheater") is not None)
        run.add_worker("embedded")
        status = run.until(
            "the ban and a version",
            lambda status: (
                status.newest_version >= 1 and getattr(worker_named(status, "cheater"), "state", "") == "banned"
            ),
        )
        embedded = worker_named(status, "embedded")
        assert embedded is not None
        assert (embedded.submissions_rejected, embedded.submissions_accepted > 0) == (0, True)
