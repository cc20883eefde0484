"""A contributor's whole life with real processes: install, join, pause, resume, battery, kill, finish, lost laptop, remove."""

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from end_to_end.commands import eventually, wait_for_text
from end_to_end.swarm import DEADLINE_S, Swarm, small_config, swarm, worker_named
from support.networks import needs_namespaces
from tools.wheel import build_wheel, install

pytestmark = [pytest.mark.slow, needs_namespaces]
POWER = "/sys/class/power_supply"
OWNER_ROLES = ("coordinator", "trainer", "relay-1", "validator")


@dataclass
class Laptop:
    """A machine with the installed package, a home, a battery, and a systemd that only writes down what it is asked."""

    root: Path
    commands: Path

    def __post_init__(self) -> None:
        (self.root / "bin").mkdir()
        (self.root / "bin" / "systemctl").write_text(
            f'#!/bin/sh\necho "$@" >> {shlex.quote(str(self.root))}/systemctl.txt\n'
        )
        (self.root / "bin" / "systemctl").chmod(0o755)
        (self.root / "power" / "AC").mkdir(parents=True)
        (self.root / "power" / "BAT0").mkdir()
        (self.root / "power" / "AC" / "type").write_text("Mains\n")
        (self.root / "power" / "BAT0" / "type").write_text("Battery\n")
        self.plug(is_in=True)

    def plug(self, *, is_in: bool) -> None:
        (self.root / "power" / "BAT0" / "status").write_text("Charging\n" if is_in else "Discharging\n")
        (self.root / "power" / "AC" / "online").write_text(f"{int(is_in)}\n")

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        own = {"HOME": str(self.root), "XDG_CONFIG_HOME": str(self.root / "config"), "PATH": path}
        return kept | own | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}

    def shoal(self, *words: object, expect: int = 0) -> str:
        done = subprocess.run(
            [self.commands / "shoal", *map(str, words)],
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout + done.stderr

    @contextmanager
    def working(self, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """The command of the installed unit, on this machine's battery."""
        unit = (self.root / "config" / "systemd" / "user" / "shoal-worker.service").read_text()
        (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
        variables = dict(re.findall(r"^Environment=(\w+)=(.*)$", unit, re.MULTILINE))
        script = f'mount --bind "$0" {POWER} && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", script, str(self.root / "power"), *shlex.split(line)]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=self.root, env=self.environment | variables, stdout=out, stderr=subprocess.STDOUT
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(DEADLINE_S)


def accepted(run: Swarm) -> int:
    status = run.until("the worker's registration", lambda status: worker_named(status, "ann") is not None)
    worker = worker_named(status, "ann")
    assert worker is not None
    return worker.submissions_accepted


def more_than(run: Swarm, count: int) -> int:
    eventually(lambda: accepted(run) > count or None, lambda: f"no more than {count} were accepted")
    return accepted(run)


def after(log: Path, said: str, then: str) -> None:
    """Waits for one text behind another."""

    def look() -> bool | None:
        return then in log.read_text().rpartition(said)[2] or None

    eventually(look, lambda: f"{then!r} never came after {said!r}:\n{log.read_text()[-2000:]}")


def test_a_contributors_whole_life(tmp_path: Path) -> None:
    commands = install(tmp_path / "env", f"{build_wheel(tmp_path / 'dist')}[worker]")
    (tmp_path / "laptop").mkdir()
    laptop = Laptop(tmp_path / "laptop", commands)
    home, backup = laptop.root / "worker", tmp_path / "stick"
    with swarm(small_config(tmp_path / "run", steps=1000)) as run:
        run.add_owner_roles(*OWNER_ROLES)
        key = run.directory.descriptor().run_key
        words = (
            run.config.coordinator_url,
            "--run-key",
            key,
            "--dir",
            home,
            "--name",
            "ann",
            "--not-on-battery",
        )
        laptop.shoal("service", "install", "--no-start", *words)
        pause_and_battery(laptop, run, home, tmp_path / "first.log")
        (tmp_path / "passphrase").write_text("correct horse\n")
        secret = ("--key", home / "worker.key", "--passphrase-file", tmp_path / "passphrase")
        laptop.shoal("key", "backup", backup, *secret)
        earned = finish_after_a_kill(laptop, run, home, tmp_path)
        home.rename(tmp_path / "lost")
        laptop.shoal("key", "restore", backup, *secret)
        with laptop.working(tmp_path / "restored.log") as worker:
            assert more_than(run, earned) > earned, "credit goes on where it was"
            assert "ended" in laptop.shoal("work", "finish", "--dir", home) or worker.wait(DEADLINE_S) == 0
        assert len([one for one in run.client.status().workers if one.name == "ann"]) == 1, "it is the same account"
    laptop.shoal("service", "remove")
    assert not list((laptop.root / "config" / "systemd" / "user").iterdir())
    assert "disable --now shoal-worker.service" in (laptop.root / "systemctl.txt").read_text()
    assert not [log for log in tmp_path.glob("*.log") if "Traceback" in log.read_text()]


def pause_and_battery(laptop: Laptop, run: Swarm, home: Path, log: Path) -> None:
    with laptop.working(log):
        count = more_than(run, 0)
        assert "working" in laptop.shoal("work", "status", "--dir", home)
        assert "paused by you" in laptop.shoal("work", "pause", "--dir", home)
        assert "resting" in laptop.shoal("work", "status", "--dir", home)
        laptop.shoal("work", "resume", "--dir", home)
        wait_for_text(log, "working again")
        count = more_than(run, count)
        laptop.plug(is_in=False)
        wait_for_text(log, "resting: this machine is on battery")
        laptop.plug(is_in=True)
        after(log, "resting: this machine is on battery", "working again")
        more_than(run, count)


def finish_after_a_kill(laptop: Laptop, run: Swarm, home: Path, root: Path) -> int:
    with laptop.working(root / "killed.log") as worker:
        more_than(run, accepted(run))
        laptop.shoal("work", "pause", "--dir", home)
        worker.kill()
        worker.wait(DEADLINE_S)
    assert "No worker runs in" in laptop.shoal("work", "status", "--dir", home, expect=78)
    with laptop.working(root / "again.log") as worker:
        wait_for_text(root / "again.log", "resting: paused by you")  # a pause outlasts its worker
        laptop.shoal("work", "resume", "--dir", home)
        more_than(run, accepted(run))
        laptop.shoal("work", "finish", "--dir", home)
        assert worker.wait(DEADLINE_S) == 0
        assert "leaving, as you asked" in (root / "again.log").read_text()
    return accepted(run)
