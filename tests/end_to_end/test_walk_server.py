"""The owner of a server walks through the guide: public addresses, `shoal up`, steering, logs, backup, restore, ledger."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from end_to_end.commands import answer, eventually, shoal, wait_for_text
from end_to_end.swarm import DEADLINE_S, small_config
from shoal.config import to_toml
from support.networks import OWNER_HOST, cable, needs_namespaces

pytestmark = pytest.mark.slow
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
@pytest.mark.parametrize("command", ["init", "up"])
def test_a_dry_run_of_each_committed_run_file_prints_settings_and_warnings_and_makes_nothing(
    file: Path, command: str, tmp_path: Path
) -> None:
    said = answer(command, file, "--dry-run", here=tmp_path)
    assert "[coordinator]" in said
    warnings = {line.partition("warning: ")[2] for line in said.splitlines() if "warning: " in line}
    assert any("is an example; name your own machine" in line for line in warnings) == (file.stem != "demo")
    assert any("There is no calibration" in line for line in warnings) == (file.stem != "demo")
    assert not list(tmp_path.iterdir())


@needs_namespaces
def test_an_owner_of_a_server(tmp_path: Path) -> None:
    run, run_file = tmp_path / "run", tmp_path / "mine.toml"
    everywhere = {"host": "0.0.0.0"}
    run_file.write_text(to_toml(small_config(run, steps=1000, coordinator=everywhere, broadcast=everywhere)))
    with cable() as ends:
        server = ends.inside(ends.owner)
        make_run(run_file, run, server)
        up_log = tmp_path / "up.log"
        break_key_of(run, "local-1")
        with shoal(up_log, "up", run, "--workers", 2, inside=server) as up:
            wait_for_text(up_log, "local-1 ended for good: ")
            assert "worker.key" in up_log.read_text().partition("local-1 ended for good: ")[2]
            wait_for_log(run, "local-2", "submitted")
            steer(run_file, run, server)
            assert "keep it secret" in answer("run", "backup", tmp_path / "run.tar", run, inside=server)
            answer("run", "drain", run, inside=server)
            assert up.wait(DEADLINE_S) == 0, up_log.read_text()[-2000:]
        assert "is drained at version" in up_log.read_text()
        check_ledger(tmp_path, run, server)
        restored = tmp_path / "restored"
        assert f"go on with: shoal up {restored}" in answer("run", "restore", tmp_path / "run.tar", "--to", restored)
        again_log = tmp_path / "again.log"
        with shoal(again_log, "up", restored, "--workers", 1, inside=server):
            wait_for_log(restored, "local-1", "submitted")
    assert "Traceback" not in up_log.read_text() + again_log.read_text()


def make_run(run_file: Path, run: Path, server: Sequence[str]) -> None:
    """The first try lacks the public addresses; the sentence that says so names them."""
    refusal = answer("init", run_file, inside=server, expect=78)
    flags = re.findall(r"(--\w+\.public_url) (http://[\d.:]+\d)", refusal)
    assert len(flags) == 2, refusal
    assert not run.exists()
    said = answer("init", run_file, *(word for flag in flags for word in flag), inside=server)
    assert f"shoal work http://{OWNER_HOST[4]}:" in said


def break_key_of(run: Path, worker: str) -> None:
    key = run / "workers" / worker / "worker.key"
    key.parent.mkdir(parents=True)
    key.write_text("no key")


def wait_for_log(run: Path, role: str, text: str) -> None:
    eventually(lambda: text in said_by(run, role) or None, lambda: f"{role} says:\n{said_by(run, role)}")


def said_by(run: Path, role: str) -> str:
    log = run / "logs" / f"{role}.log"
    return log.read_text() if log.exists() else ""


def steer(run_file: Path, run: Path, server: Sequence[str]) -> None:
    """WHERE is the run file or the directory; both mean the same run."""
    assert "local-2" in answer("run", "status", run_file, inside=server)
    assert "step 0 slot" in answer("logs", "local-2", run, "--lines", 200)
    assert "paused at step" in answer("run", "pause", run, inside=server)
    wait_for_log(run, "local-2", "the run is paused")
    assert "paused" in answer("run", "status", run, inside=server)
    assert "running at step" in answer("run", "resume", run_file, inside=server)


def check_ledger(root: Path, run: Path, server: Sequence[str]) -> None:
    """While no coordinator is running, the commands read the store of the run."""
    shown = answer("ledger", "show", run, inside=server)
    for sentence in ("begins", "local-2", "joins with", "the owner sets the run to paused", "balances, in tokens"):
        assert sentence in shown, shown
    answer("ledger", "export", run, root / "ledger.jsonl", inside=server)
    assert answer("ledger", "verify", root / "ledger.jsonl").count("ok: ") == 3
    assert answer("ledger", "show", root / "ledger.jsonl") == shown
