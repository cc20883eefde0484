"""The multi-node `torchrun` line of docs/guide/gpu-machines.md, with two launchers on this host: one group, one rank 0."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from end_to_end.swarm import small_config, swarm
from shoal.host.supervisor import Role
from shoal.host.swarm import Swarm
from shoal.owner.control import find_run
from shoal.rundir import RunDirectory
from support.ports import free_port

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "gpu-machines.md"
STEPS = 2


def documented_line() -> list[str]:
    """The command for several nodes, as it is printed."""
    text = PAGE.read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^torchrun --nnodes.*$", text, re.MULTILINE)
    return shlex.split(line)


def on_two_nodes_with_one_process_each(line: list[str], port: int, directory: RunDirectory) -> list[str]:
    changed = {"--nnodes": "2", "--nproc-per-node": "1", "--rdzv-endpoint": f"127.0.0.1:{port}"}
    words = [
        f"{name}={changed.get(name, value)}" if value else name for name, _, value in (w.partition("=") for w in line)
    ]
    start = words.index("--no-python")
    shoal = [sys.executable, "-m", "shoal", "train", str(directory.run_file)]
    return [sys.executable, "-m", "torch.distributed.run", *words[1:start], "--no-python", *shoal]


def test_the_line_names_a_rendezvous_that_all_nodes_share() -> None:
    line = documented_line()
    assert "--rdzv-backend=c10d" in line
    assert any(word.startswith("--rdzv-id=") for word in line)
    assert line[-3:] == ["shoal", "train", "run.toml"]


@pytest.mark.slow
def test_two_launchers_train_one_run(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", steps=1000, training={"device": "cpu", "checkpoint_every": 1})
    with swarm(config) as run:
        run.add_owner_roles("coordinator", "validator")
        plain = next(
            role for role in Swarm(run.directory, run.directory.config()).owner_roles() if role.name == "trainer"
        )
        command = tuple(on_two_nodes_with_one_process_each(documented_line(), free_port(), run.directory))
        for node in range(2):
            run.supervisor.add(Role(f"trainer-{node}", command, tmp_path / f"trainer-{node}.log", plain.env))
        run.add_worker("anna")
        run.until(f"version {STEPS}", lambda status: status.newest_version >= STEPS)
        find_run(str(run.directory.root)).set_state("draining")
        drained = run.until(
            "both launchers to end", lambda status: not any("trainer" in name for name in run.supervisor.alive)
        )
        exits = [event.exit_code for event in run.events if event.kind == "exited" and event.role.startswith("trainer")]
        assert exits == [0, 0]
        assert [view.version for view in run.history().versions] == list(range(drained.newest_version + 1))
    logs = [(tmp_path / f"trainer-{node}.log").read_text() for node in range(2)]
    assert sorted("origin at" in log for log in logs) == [False, True], "exactly one rank serves the weights"
