"""The owner steers a live run from another terminal, backs it up, drains it, and goes on from the backup elsewhere."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from end_to_end.commands import eventually, shoal, status_when, wait_for_text
from end_to_end.swarm import DEADLINE_S, small_config
from shoal.config import to_toml
from shoal.protocol.client import CoordinatorClient

pytestmark = pytest.mark.slow


def command(*arguments: object, expect: int = 0) -> str:
    """One command, in a directory that has nothing to do with the run."""
    result = subprocess.run(
        [sys.executable, "-m", "shoal", *map(str, arguments)],
        cwd="/",
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == expect, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout + result.stderr


def test_pause_ban_backup_drain_and_restore(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", steps=1000)
    run_file = tmp_path / "mine.toml"
    run_file.write_text(to_toml(config))
    url = config.coordinator_url
    with shoal(tmp_path / "up.log", "up", run_file) as up:
        wait_for_text(tmp_path / "up.log", "contributors join with: shoal work")
        with (
            shoal(tmp_path / "ann.log", "work", url, "--dir", "here", "--name", "ann"),
            shoal(tmp_path / "eve.log", "work", url, "--dir", "here", "--name", "eve") as eve,
        ):
            status_when(url, "version 2", lambda status: status.newest_version >= 2)

            assert "paused at step" in command("run", "pause", run_file)
            wait_for_text(tmp_path / "ann.log", "the run is paused")
            paused = status_when(url, "quiet", lambda status: not status.submissions_pending)
            assert paused.run_state == "paused"
            assert "paused" in command("run", "status", url)

            wait_for_text(tmp_path / "eve.log", "joined as eve")
            assert "eve" in command("run", "ban", "eve", tmp_path / "run", "--reason", "will not say")
            wait_for_text(tmp_path / "eve.log", "This key is banned: by the owner: will not say.")
            wait_for_text(tmp_path / "eve.log", "Waiting until the ban is lifted")
            assert "on probation again" in command("run", "unban", "eve", run_file, "--reason", "said sorry")
            wait_for_text(tmp_path / "eve.log", "the ban is lifted, joining again")
            assert eve.poll() is None
            command("run", "ban", "nobody-known", run_file, "--reason", "x", expect=os.EX_CONFIG)

            assert "running" in command("run", "resume", url, "--key", tmp_path / "run" / "keys" / "run.key")
            eventually(
                lambda: True if (tmp_path / "eve.log").read_text().count("joined as eve") == 2 else None,
                lambda: "eve never joined again",
            )
            status_when(url, "more steps", lambda status: status.newest_version > paused.newest_version + 1)
            backup = tmp_path / "backup.tar"
            assert "keep it secret" in command("run", "backup", backup, run_file)
            at_backup = status_when(url, "an answer", lambda status: True).newest_version

            assert "drain" in command("run", "drain", run_file)
            assert up.wait(DEADLINE_S) == 0, (tmp_path / "up.log").read_text()[-2000:]
    assert "is drained at version" in (tmp_path / "up.log").read_text()
    command("run", "restore", backup, expect=1)

    restored = tmp_path / "elsewhere"
    assert f"go on with: shoal up {restored}" in command("run", "restore", backup, "--to", restored)
    go_on(tmp_path, url, restored, at_backup)


def go_on(tmp_path: Path, url: str, restored: Path, at_backup: int) -> None:
    with shoal(tmp_path / "again.log", "up", restored / "run.toml") as up:
        wait_for_text(tmp_path / "again.log", "contributors join with: shoal work")
        with shoal(tmp_path / "bob.log", "work", url, "--dir", "here", "--name", "bob"):
            status_when(url, "steps after the backup", lambda status: status.newest_version >= at_backup + 2)
            with CoordinatorClient(url, None, deadline_s=10.0) as client:
                kinds = [json.loads(line)["kind"] for line in client.ledger_export().splitlines()[:-1]]
        up.send_signal(signal.SIGINT)
        assert up.wait(DEADLINE_S) == 130
    assert {"run_state", "ban", "unban", "restored"} <= set(kinds)
