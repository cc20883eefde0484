"""`shoal train` under torchrun: two ranks that shard the policy train the run that one would."""

import sys
from pathlib import Path

import pytest

from end_to_end.swarm import small_config, swarm
from shoal import demo
from shoal.rundir import RunDirectory
from shoal.supervisor import Role
from shoal.training import Checkpoints, World

STEPS = 3


@pytest.mark.slow
def test_two_ranks_train_a_run_and_publish_every_version(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", steps=STEPS, training={"device": "cpu", "checkpoint_every": 1})
    with swarm(config) as run:
        run.add_owner_roles("coordinator", "validator")
        run.supervisor.add(under_torchrun(run.directory))
        run.add_worker("anna")
        run.until("the last version", lambda status: status.newest_version == STEPS)
        history = run.history()
        assert [view.version for view in history.versions] == list(range(STEPS + 1))
        assert len({view.manifest_digest for view in history.versions}) == STEPS + 1
        assert all(view.report["samples"] in (8, 16, 24, 32) for view in history.versions[1:])
    newest = Checkpoints(run.directory.trainer / "checkpoints", World(), keep=2).steps()[-1]
    assert newest >= STEPS - 1  # the last one may still have been under way


def under_torchrun(directory: RunDirectory) -> Role:
    plain = next(role for role in demo.owner_roles(directory, directory.config()) if role.name == "trainer")
    shoal = plain.command[plain.command.index("train") :]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "shoal")
    return Role("trainer", (sys.executable, *launcher, *shoal), plain.log, plain.env)
