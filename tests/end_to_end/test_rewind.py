"""Real processes around a rewind: a step that does not repeat, a rewind by hand on a running swarm, and kills in between."""

import re
import signal
from pathlib import Path

import pytest

from end_to_end.swarm import Swarm, small_config, swarm
from shoal.host import swarm as host
from shoal.host.threads import Threads
from shoal.owner.control import find_run
from shoal.owner.rewinding import rewind
from shoal.rundir import checkpoint_steps


def add_trainer_that_may_rewind(run: Swarm) -> None:
    allowed = host.Swarm(run.directory, run.config, threads=Threads(each=1), auto_rewind=True)
    run.supervisor.add(next(role for role in allowed.owner_roles() if role.name == "trainer"))


def change_learning_rate(run: Swarm) -> None:
    """From now on a repeated step gives other weights, as on a machine whose kernels are not deterministic."""
    text = run.directory.run_file.read_text()
    changed = re.sub(r"(?m)^learning_rate = .*$", "learning_rate = 2e-4", text)
    assert changed != text
    run.directory.run_file.write_text(changed)


def exits(run: Swarm, role: str) -> int:
    return sum(event.role == role and event.kind == "exited" for event in run.events)


@pytest.mark.slow
def test_a_swarm_goes_on_after_rewinds_and_kills(tmp_path: Path) -> None:
    training = {"checkpoint_every": 4, "device": "cpu"}
    config = small_config(tmp_path / "run", steps=1000, training=training)
    with swarm(config) as run:
        run.add_owner_roles("coordinator", "relay-1", "validator")
        add_trainer_that_may_rewind(run)
        run.add_worker("anna")
        run.until("version 5", lambda status: status.newest_version >= 5)
        run.until("a checkpoint", lambda status: 4 in checkpoint_steps(run.directory.checkpoints))
        run.until("an unsaved version", lambda status: status.newest_version % 4 in (1, 2))
        change_learning_rate(run)
        run.kill("trainer", signal.SIGKILL)
        rewound = run.until("the rewind", lambda status: status.epoch == 1)
        assert rewound.newest_version % 4 == 0
        (view,) = run.history().rewinds
        assert view.reason.startswith("by the trainer: Version ")
        assert view.lost_steps >= 1
        run.until("new versions", lambda status: status.newest_version >= view.newest_before + 2)

        done = rewind(find_run(str(run.directory.root)), version=view.version, reason="by hand")
        run.kill("coordinator", signal.SIGKILL)
        run.kill("trainer", signal.SIGKILL)
        assert (done.epoch, done.version) == (2, view.version)
        run.until("versions of epoch 2", lambda s: s.epoch == 2 and s.newest_version >= done.version + 1)
        run.kill("trainer", signal.SIGKILL)
        run.until("more of them", lambda status: status.newest_version >= done.version + 3)

        versions = run.history().versions
        assert [one.version for one in versions] == list(range(len(versions)))
        assert {one.epoch for one in versions[done.version + 1 :]} == {2}
        kinds = [entry.kind for entry in run.ledger()]
        assert kinds.count("rewound") == 2
        assert (exits(run, "anna"), exits(run, "relay-1"), exits(run, "validator")) == (0, 0, 0)
        assert all(
            worker.state != "banned" and not worker.submissions_rejected for worker in run.client.status().workers
        )
