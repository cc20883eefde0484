"""Each alert, from what the roles leave in the store to the status, the event and the line in the terminal."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.cli.run import status
from shoal.coordinator.alerting import AlertWatch
from shoal.coordinator.rules.alerts import ALERTS, BY_NAME
from shoal.coordinator.store.database import Transaction
from shoal.coordinator.store.rows import insert
from shoal.coordinator.store.tables import BatchRow, EvaluationRow, VersionRow
from shoal.metrics import EventLog
from shoal.observe.view import alert_lines
from shoal.protocol import api
from support.swarm import HEARTBEAT, Swarm, running, small_config

STEPS = 32
HEALTHY = {
    "reward_mean": 0.5, "entropy": 1.0, "kl_behaviour": 0.01, "truncation_rate": 0.05, "repetition_rate": 0.01,
    "time_wait_batch_s": 0.5, "behaviour_fraction": 0.1,
}  # fmt: skip


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with running(tmp_path, small_config(run={"steps": 500})) as swarm:
        swarm.join("ann")
        yield swarm


def history(swarm: Swarm, accuracy: float = 0.5, **late: float) -> None:
    """32 steps, of which the last eight have other values."""

    def work(connection: Transaction) -> None:
        for version in range(STEPS + 1):
            report = HEALTHY | (late if version > STEPS - 8 else {})
            digest, at = f"{version:064x}", swarm.clock() - (STEPS - version)
            insert(connection, VersionRow(version, digest, digest, 1, at, json.dumps(report)))
            if version < STEPS:
                insert(connection, BatchRow(version, at, 2, 2, "{}", "{}"))
            if version % 8 == 0:
                body = {"accuracy": accuracy, "problems": 200, "samples": 1, "mean_tokens": 9, "seconds": 1}
                insert(connection, EvaluationRow(version, at, json.dumps(body | {"version": version})))

    swarm.write(work)


def unused_version(swarm: Swarm) -> None:
    history(swarm)
    swarm.clock.advance(1000)
    swarm.client("ann").heartbeat(HEARTBEAT)


def no_validator(swarm: Swarm) -> None:
    swarm.publish(0)
    swarm.work(swarm.client("ann"))
    swarm.clock.advance(BY_NAME["no_validator"].threshold + 1)


def low_disk(swarm: Swarm) -> None:
    free = int(BY_NAME["disk_low"].threshold * swarm.run.min_free_bytes) - 1
    swarm.alter(free_bytes=lambda path: free)


CAUSES: dict[str, Callable[[Swarm], None]] = {
    "divergence": lambda swarm: history(swarm, kl_behaviour=0.2),
    "divergence_unseen": lambda swarm: history(swarm, behaviour_fraction=0.0),
    "entropy_collapse": lambda swarm: history(swarm, entropy=0.05),
    "truncation_rising": lambda swarm: history(swarm, truncation_rate=0.3),
    "repetition_rising": lambda swarm: history(swarm, repetition_rate=0.3),
    "reward_without_heldout": lambda swarm: history(swarm, reward_mean=0.9),
    "version_unused": unused_version,
    "no_validator": no_validator,
    "disk_low": low_disk,
}


def alerts(swarm: Swarm) -> list[api.AlertView]:
    return swarm.client("x").status().alerts


def test_a_healthy_run_raises_nothing(swarm: Swarm) -> None:
    history(swarm)
    assert alerts(swarm) == []


def test_every_alert_of_the_table_is_driven_here() -> None:
    assert list(CAUSES) == [alert.name for alert in ALERTS]


@pytest.mark.parametrize("name", CAUSES)
def test_an_alert_reaches_the_status_the_events_and_the_terminal(swarm: Swarm, name: str) -> None:
    CAUSES[name](swarm)
    (found,) = alerts(swarm)
    assert (found.name, found.advice) == (name, BY_NAME[name].advice)
    events = EventLog()
    seen: list[dict[str, object]] = []
    events.listen(seen.append)
    watch = AlertWatch(events)
    watch.note([found])
    watch.note([found])
    watch.note([])
    assert [(record["event"], record["name"]) for record in seen] == [("alert", name), ("alert_over", name)]
    (line,) = alert_lines(swarm.client("x").status())
    assert line.startswith(f"alert {name.replace('_', ' ')}: {found.seen}. ")
    assert re.search(r"[a-z].*\.$", found.advice), "it says what to do"


def test_numbers_that_are_no_numbers_raise_nothing(swarm: Swarm) -> None:
    history(swarm, kl_behaviour=float("nan"), entropy=float("inf"), reward_mean=float("-inf"))
    assert alerts(swarm) == []


def test_a_disk_that_cannot_be_asked_is_no_alert_and_stops_nothing(swarm: Swarm) -> None:
    def broken(path: Path) -> int:
        raise OSError("no such device")

    swarm.alter(free_bytes=broken)
    assert alerts(swarm) == []
    assert swarm.client("x").status().disk_free_bytes is None


def test_status_says_what_the_trainer_needs_and_what_it_has(
    swarm: Swarm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From live rates: a slot of two groups takes ten seconds, and a step of two groups one, half of it waiting."""
    swarm.publish(0)
    worker = swarm.client("ann")
    lease = swarm.lease(worker)
    swarm.clock.advance(10.0)
    worker.submit(lease.lease_id, b"rollouts")
    swarm.accept()

    def steps(connection: Transaction) -> None:
        for version in range(1, 20):
            digest, at = f"{version:064x}", swarm.clock() - (20 - version)
            insert(connection, VersionRow(version, digest, digest, 1, at, json.dumps(HEALTHY)))
            insert(connection, BatchRow(version, at, 2, 2, "{}", "{}"))

    swarm.write(steps)
    seen = swarm.client("x").status()
    assert "needs 22 workers of this speed" in seen.advice  # 2 groups in 0.5 s at 0.2 per second, a tenth more
    assert ", has 1" in seen.advice
    owned = SimpleNamespace(status=lambda: (seen, swarm.client("x").history()))
    monkeypatch.setattr("shoal.cli.run._find", lambda where, key: owned)
    monkeypatch.setenv("COLUMNS", "300")
    status()
    assert seen.advice in capsys.readouterr().out
