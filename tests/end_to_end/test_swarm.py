"""The whole loop with real processes over real HTTP: honest work trains the policy, lies are banned, kills are survived."""

import json
import signal
from pathlib import Path

import pytest

from end_to_end.swarm import Swarm, group_is_gone, small_config, swarm, worker_named
from shoal.protocol.api import StatusView

OWNER_ROLES = ("coordinator", "trainer", "relay-1", "validator")


def start(run: Swarm) -> None:
    """The cheater joins first and alone, so that it gets its slot whichever is faster."""
    run.add_owner_roles(*OWNER_ROLES)
    run.add_worker("cheater-rewards", "rewards")
    run.until("the cheater's joining", lambda status: worker_named(status, "cheater-rewards") is not None)
    run.add_worker("honest-1")
    run.add_worker("honest-2")


def is_banned(status: StatusView) -> bool:
    cheater = worker_named(status, "cheater-rewards")
    return cheater is not None and cheater.state == "banned"


def check_outcome(run: Swarm, steps: int) -> None:
    status, history = run.client.status(), run.history()
    honest = [worker for worker in status.workers if worker.name.startswith("honest-")]
    assert status.newest_version == steps
    assert [ban.name for ban in history.bans] == ["cheater-rewards"]
    assert history.bans[0].reason.startswith("reward: ")
    assert sum(worker.submissions_accepted for worker in honest) > 0
    assert [worker.submissions_rejected for worker in honest] == [0] * len(honest)
    assert max(status.age_histogram) <= status.async_level
    check_ledger(run, steps)


def check_ledger(run: Swarm, steps: int) -> None:
    entries = run.ledger()
    batches = [json.loads(entry.body) for entry in entries if entry.kind == "recorded"]
    versions = [json.loads(entry.body)["version"] for entry in entries if entry.kind == "version"]
    consumed = [group for batch in batches for group in batch["groups"]]
    assert [batch["step"] for batch in batches] == list(range(steps))
    assert versions == list(range(steps + 1))
    assert len(consumed) == len(set(consumed)) > 0
    assert sum(entry.kind == "ban" for entry in entries) == 1


def test_honest_workers_train_a_policy_and_a_cheater_is_banned(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", steps=2)
    with swarm(config) as run:
        start(run)
        run.until("the ban", is_banned)
        run.kill("coordinator", signal.SIGKILL)
        run.until("the last version", lambda status: status.newest_version == 2)
        check_outcome(run, steps=2)
        restarted = [event.role for event in run.events if event.kind == "restarted"]
        assert restarted == ["coordinator"]
        pids = run.pids()
        assert len(pids) >= len(OWNER_ROLES)
    assert all(group_is_gone(pid) for pid in pids)


@pytest.mark.slow
def test_any_role_may_be_killed_and_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", steps=5, training={"groups_per_step": 4, "checkpoint_every": 2})
    with swarm(config) as run:
        start(run)
        run.until("version 1 and the ban", lambda status: status.newest_version >= 1 and is_banned(status))
        for name in ("trainer", "validator", "honest-1", "relay-1", "coordinator"):
            run.kill(name, signal.SIGKILL)
        run.until("version 3", lambda status: status.newest_version >= 3)
        restarted = {event.role for event in run.events if event.kind == "restarted"}
        assert restarted == {"trainer", "validator", "honest-1", "relay-1", "coordinator"}
        pids, stopped_at = run.pids(), run.client.status().newest_version
    assert all(group_is_gone(pid) for pid in pids)
    with swarm(config) as run:
        run.add_owner_roles(*OWNER_ROLES)
        run.add_worker("honest-1")
        run.add_worker("honest-2")
        status = run.until("the coordinator", lambda status: True)
        assert status.newest_version >= stopped_at
        run.until("the last version", lambda status: status.newest_version == 5)
        check_outcome(run, steps=5)
