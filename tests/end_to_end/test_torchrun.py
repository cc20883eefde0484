"""`shoal train` under torchrun: two ranks that shard the policy train the run that one would, and end together when drained."""

import sys
from pathlib import Path

import pytest

from end_to_end.swarm import small_config, swarm
from shoal.host.supervisor import Role
from shoal.host.swarm import Swarm
from shoal.owner.control import find_run
from shoal.rundir import RunDirectory
from shoal.training import Checkpoints, World
from support.ports import free_port

STEPS = 3


@pytest.mark.slow
def test_two_ranks_train_a_run_publish_every_version_and_are_drained(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", steps=1000, training={"device": "cpu", "checkpoint_every": 1})
    with swarm(config) as run:
        run.add_owner_roles("coordinator", "validator")
        run.supervisor.add(under_torchrun(run.directory))
        run.add_worker("anna")
        run.until(f"version {STEPS}", lambda status: status.newest_version >= STEPS)
        find_run(str(run.directory.root)).set_state("draining")
        drained = run.until("the end of the trainer", lambda status: "trainer" not in run.supervisor.alive)
        assert drained.run_state == "drained"
        assert [event.exit_code for event in run.events if (event.role, event.kind) == ("trainer", "exited")] == [0]
        versions = run.history().versions
        assert [view.version for view in versions] == list(range(drained.newest_version + 1))
        assert len({view.manifest_digest for view in versions}) == len(versions)
        assert all(view.report["samples"] in (8, 16, 24, 32) for view in versions[1:])
    newest = Checkpoints(run.directory.trainer / "checkpoints", World(), keep=2).steps()[-1]
    assert newest == drained.newest_version


@pytest.mark.slow
def test_two_launchers_find_each_other_at_the_rendezvous_and_train_as_one(tmp_path: Path) -> None:
    """The line of docs/guide/gpu-machines.md for several nodes, with two launchers of one process each."""
    config = small_config(tmp_path / "run", steps=2, training={"device": "cpu", "checkpoint_every": 1})
    with swarm(config) as run:
        run.add_owner_roles("coordinator", "validator")
        port = free_port()
        for node in (0, 1):
            run.supervisor.add(node_of(run.directory, node, port))
        run.add_worker("anna")
        run.until("version 2", lambda status: status.newest_version >= 2)
        assert [view.version for view in run.history().versions] == [0, 1, 2]
    logs = [run.directory.log_file(f"trainer-{node}").read_text() for node in (0, 1)]
    assert [log.count("origin at ") for log in logs].count(1) == 1, "every node took itself for rank 0"
    assert not any("published version 2" in log and "origin at " not in log for log in logs)


def node_of(directory: RunDirectory, node: int, port: int) -> Role:
    """One launcher of the multi-node line; `--no-python shoal` as the guide says."""
    shoal = str(Path(sys.executable).with_name("shoal"))
    launcher = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d")
    meeting = (f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=two-launchers")
    command = (sys.executable, *launcher, *meeting, "--no-python", shoal, "train", str(directory.run_file))
    return Role(f"trainer-{node}", (*command, "--threads", "1"), directory.log_file(f"trainer-{node}"))


def under_torchrun(directory: RunDirectory) -> Role:
    plain = next(role for role in Swarm(directory, directory.config()).owner_roles() if role.name == "trainer")
    shoal = plain.command[plain.command.index("train") :]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "shoal")
    return Role("trainer", (sys.executable, *launcher, *shoal), plain.log, plain.env)
