"""A run by hand: the owner types `shoal up`, a stranger `shoal work` in another directory; Ctrl-C is always a clean end."""

import json
import signal
from pathlib import Path

import pytest

from end_to_end.commands import shoal, status_of, wait_for_text
from end_to_end.swarm import DEADLINE_S, free_ports, small_config
from shoal.config import to_toml
from shoal.locks import hold
from shoal.owner.create import initialise
from shoal.tasks import Task

pytestmark = pytest.mark.slow


def test_the_owner_and_a_stranger_finish_a_run_together(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", steps=2)
    run_file = tmp_path / "mine.toml"
    run_file.write_text(to_toml(config))
    with shoal(tmp_path / "up.log", "up", run_file) as up:
        wait_for_text(tmp_path / "up.log", "contributors join with: shoal work")
        run_key = initialise(config).descriptor().run_key
        join = ("work", config.coordinator_url, "--run-key", run_key, "--dir", "here", "--name", "stranger")
        with shoal(tmp_path / "stranger.log", *join) as stranger:
            assert up.wait(DEADLINE_S) == 0, (tmp_path / "up.log").read_text()[-2000:]
            stranger.wait(DEADLINE_S)
    words = (tmp_path / "stranger.log").read_text()
    assert "joined as stranger (registered)" in words
    assert "credit" in words
    assert (tmp_path / "stranger" / "here" / "worker.key").is_file()
    assert "is finished: 2 versions" in (tmp_path / "up.log").read_text()


def test_an_owner_with_workers_of_its_own_needs_nobody_and_gets_a_report(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", steps=2)
    run_file = tmp_path / "mine.toml"
    run_file.write_text(to_toml(config))
    for log in (tmp_path / "up.log", tmp_path / "again.log"):  # a finished run ends at once, and well
        with shoal(log, "up", run_file, "--workers", 2) as up:
            assert up.wait(DEADLINE_S) == 0, log.read_text()[-2000:]
        assert "Held-out accuracy" in log.read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {worker["worker"] for worker in summary["workers"]} == {"local-1", "local-2"}
    assert (summary["steps"], summary["honest_rejected"], summary["ledger_ok"]) == (2, 0, True)
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()


def test_a_stranger_who_interrupts_gives_the_slot_back_and_may_return(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", steps=50)
    run_file = tmp_path / "mine.toml"
    run_file.write_text(to_toml(config))
    with shoal(tmp_path / "up.log", "up", run_file) as up:
        wait_for_text(tmp_path / "up.log", "contributors join with: shoal work")
        directory = tmp_path / "contributor"
        for visit in ("first", "second"):
            log = tmp_path / f"{visit}.log"
            with shoal(log, "work", config.coordinator_url, "--dir", directory, "--name", visit) as stranger:
                wait_for_text(log, "submitted")
                stranger.send_signal(signal.SIGINT)
                assert stranger.wait(DEADLINE_S) == 130
            assert "Traceback" not in log.read_text()
            assert "tokens this time" in log.read_text()
        status = status_of(config.coordinator_url)
        assert status is not None
        assert [worker.name for worker in status.workers] == ["second"]
        up.send_signal(signal.SIGINT)
        assert up.wait(DEADLINE_S) == 130
    assert "Traceback" not in (tmp_path / "up.log").read_text()
    assert status_of(config.coordinator_url) is None


def test_a_relay_without_a_parent_says_so_and_ends_on_request(tmp_path: Path) -> None:
    log = tmp_path / "relay.log"
    nobody = f"http://127.0.0.1:{free_ports(1)}"
    with shoal(log, "relay", "--upstream", nobody, "--port", 0, "--dir", "here") as relay:
        wait_for_text(log, "following")
        wait_for_text(log, "No relay")
        relay.send_signal(signal.SIGTERM)
        relay.wait(DEADLINE_S)
    assert nobody in log.read_text()
    assert "Traceback" not in log.read_text()


OWN_VERIFIER = """
from shoal.tasks import Task, verifier


@verifier(exact=True)
def is_even(task: Task, completion_text: str) -> tuple[float, str]:
    return float(len(completion_text) % 2 == 0), "an even number of letters"
"""


def own_run(tmp_path: Path) -> Path:
    (tmp_path / "own_checks.py").write_text(OWN_VERIFIER)
    rows = [
        Task(
            problem_id=f"p{number}",
            source="own",
            task_type="own_checks:is_even",
            prompt=f"{number}+1=",
            verification_info={},
        )
        for number in range(40)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(row.model_dump_json() + "\n" for row in rows))
    tasks = {"source": str(tmp_path / "tasks.jsonl"), "heldout": 4, "count": 0}
    run_file = tmp_path / "mine.toml"
    run_file.write_text(to_toml(small_config(tmp_path / "run", steps=1, tasks=tasks)))
    return run_file


def test_an_owner_with_a_verifier_and_workers_of_its_own_needs_no_other_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = own_run(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with shoal(tmp_path / "up.log", "up", run_file, "--workers", 1) as up:
        assert up.wait(DEADLINE_S) == 0, (tmp_path / "up.log").read_text()[-2000:]
    assert "is finished: 1 versions" in (tmp_path / "up.log").read_text()


def test_a_worker_of_the_owner_that_cannot_work_is_shown_with_its_reason(tmp_path: Path) -> None:
    run_file, log = tmp_path / "mine.toml", tmp_path / "up.log"
    run_file.write_text(to_toml(small_config(tmp_path / "run", steps=1)))
    taken = hold(tmp_path / "run" / "workers" / "local-1" / "lock", "")
    with taken, shoal(log, "up", run_file, "--workers", 1):
        wait_for_text(log, "local-1 ended for good: Another worker uses ")
        wait_for_text(log, "no worker of this host is left")
