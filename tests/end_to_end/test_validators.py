"""Several real validators pull by lease; a killed one loses nothing but time."""

import signal
import sqlite3
from pathlib import Path

import pytest

from end_to_end.swarm import Swarm, small_config, swarm
from shoal.host.supervisor import Role
from shoal.protocol.api import StatusView

CLAIM_S = 10.0


def validator_role(run: Swarm, name: str) -> Role:
    return run.processes.role(name, "validate", str(run.directory.run_file), "--threads", "1")


def ask(run: Swarm, question: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(f"file:{run.directory.store}?mode=ro", uri=True, timeout=30) as connection:
        return connection.execute(question).fetchall()


def claimed(run: Swarm) -> list[str]:
    return [str(row[0]) for row in ask(run, "SELECT submission_id FROM submissions WHERE state='claimed'")]


def stop_over_a_claim(run: Swarm, name: str) -> str:
    """Freezes a validator while it validates; which submission it holds."""
    while True:
        run.until("a claim", lambda status: bool(claimed(run)))
        run.kill(name, signal.SIGSTOP)
        if held := claimed(run):
            return held[0]
        run.kill(name, signal.SIGCONT)


def check_nobody_was_penalised(run: Swarm, status: StatusView) -> None:
    (worker,) = status.workers
    assert (worker.submissions_rejected, worker.state) == (0, "active")
    assert status.verdicts["quarantined"] == 0
    assert ask(run, "SELECT COUNT(*) FROM workers WHERE anomalies > 0") == [(0,)]


@pytest.mark.slow
def test_validators_share_the_work_and_a_killed_one_returns_its_own(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", steps=3, validation={"claim_s": CLAIM_S})
    with swarm(config) as run:
        run.add_owner_roles("coordinator", "trainer")
        run.add_worker("honest")
        run.supervisor.add(validator_role(run, "validator"))
        held = stop_over_a_claim(run, "validator")  # it keeps the claim, and its place, for ever
        run.supervisor.add(validator_role(run, "validator-b"))
        run.supervisor.add(validator_role(run, "validator-c"))
        run.until("version 1", lambda status: status.newest_version >= 1)
        run.kill("validator", signal.SIGKILL)
        run.kill("validator-b", signal.SIGKILL)
        status = run.until("the last version", lambda status: status.newest_version == 3)
        check_nobody_was_penalised(run, status)
        ((state, tries),) = ask(run, f"SELECT state, tries FROM submissions WHERE submission_id='{held}'")
        assert state == "decided"
        assert int(str(tries)) >= 2, "another validator took over"
        places = {path.name for path in run.directory.root.glob("validator*") if path.is_dir()}
        assert {"validator", "validator-2", "validator-3"} <= places
