"""What contributors live through while a run goes on: the screen they see, Ctrl-C, a sleeping laptop, a wrong clock."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from end_to_end.commands import eventually, shoal, status_of, wait_for_text
from end_to_end.swarm import DEADLINE_S, small_config, worker_named
from shoal.config import to_toml
from shoal.protocol.api import WorkerView

pytestmark = pytest.mark.slow
AHEAD_S = 7200
WRONG_CLOCK = f"""
import sys, time
right = time.time
time.time = lambda: right() + {AHEAD_S}
from shoal.cli.main import main
main(sys.argv[1:])
"""


@dataclass(frozen=True)
class LiveRun:
    url: str

    def worker_when(
        self, name: str, process: subprocess.Popen[bytes], log: Path, holds: Callable[[WorkerView], bool]
    ) -> WorkerView:
        def look() -> WorkerView | None:
            assert process.poll() is None, f"{name} has ended with {process.returncode}:\n{log.read_text()[-3000:]}"
            status = status_of(self.url)
            worker = worker_named(status, name) if status is not None else None
            return worker if worker is not None and holds(worker) else None

        return eventually(look, lambda: f"{name} never came so far")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """The owner's roles, which every test here uses: they take longest to start."""
    root = tmp_path_factory.mktemp("live")
    config = small_config(root / "run", steps=10_000, coordinator={"lease_s": 60, "gone_after_s": 6})
    run_file = root / "mine.toml"
    run_file.write_text(to_toml(config))
    with shoal(root / "up.log", "up", run_file):
        wait_for_text(root / "up.log", "contributors join with: shoal work")
        yield LiveRun(config.coordinator_url)


class Terminal:
    """A command on a terminal of its own, with what it shows."""

    def __init__(self, *arguments: object) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "shoal", *map(str, arguments)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "120"}
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self.screen = ""

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def until(self, text: str) -> None:
        self._read_while(lambda: text not in self.screen, f"{text!r}")

    def until_it_ends(self) -> int:
        self._read_while(lambda: self.process.poll() is None, "the end")
        self._read_while(lambda: False, "")
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE_S)
        os.close(self._ours)

    def _read_while(self, wanted: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + DEADLINE_S
        while True:
            while select.select([self._ours], [], [], 0.1)[0]:
                try:
                    self.screen += os.read(self._ours, 65536).decode(errors="replace").replace("\r\n", "\n")
                except OSError:  # the writer has gone
                    return
            if not wanted():
                return
            assert time.monotonic() < until, f"{what} never came; the screen says:\n{self.screen}"


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def terminal(*arguments: object) -> Iterator[Terminal]:
    shown = Terminal(*arguments)
    try:
        yield shown
    finally:
        shown.close()


def test_a_contributor_sees_what_happens_and_ctrl_c_gives_the_slot_back(run: LiveRun, tmp_path: Path) -> None:
    with terminal("work", run.url, "--dir", tmp_path / "here", "--name", "ann") as ann:
        ann.until("accepted so far")
        ann.press(b"\x03")
        assert ann.until_it_ends() == 130
    print(ann.screen)
    for wanted in (
        r"asking http://\S+ for its run",
        r"run small-\w+, key \w+…, protocol \d+",
        r"will fetch \d+ model files and the tasks \(.*\), then the policy's weights; only outbound HTTP is used",
        r"tasks: 200 of .*; per slot 2 tasks × 8 samples of up to 40 tokens",
        r"scoring: integer_answer",
        r"policy: version \d+, .* to fetch; \d versions .* will take up to .* are free",
        r"this machine: [\d,]+ tokens/s, \d+ cores, .*B of memory \(.*B used\), .*B/s from the relays",
        r"joined as ann \(registered\), key \w+…",
        r"step \d+ slot \d+: 16 samples, [\d,]+ tokens at [\d,]+/s, submitted",
        r"credit [\d,]+ held, [\d,]+ released",
        r"\d+ submissions? with [\d,]+ tokens this time",
        r"your key is .*/here/worker\.key, made just now: it is your account and your credit, keep it",
    ):
        assert re.search(wanted, ann.screen), f"{wanted}\n{ann.screen}"
    assert "Traceback" not in ann.screen
    leaving = re.search(r"^leaving: (?:no slot is held|(step \d+ slot .*) goe?s? to another worker)", ann.screen, re.M)
    assert leaving, ann.screen
    for slot in (leaving[1] or "").split(", "):
        assert not slot or f"gave {slot} back" in ann.screen


def test_a_contributor_whose_clock_is_hours_ahead_works_like_any_other(run: LiveRun, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRONG_CLOCK, "work", run.url, "--dir", str(tmp_path), "--name", "early"]
    log = tmp_path / "early.log"
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as early:
        try:
            worker = run.worker_when("early", early, log, lambda worker: worker.submissions_accepted >= 2)
        finally:
            early.send_signal(signal.SIGINT)
    assert worker.submissions_rejected == 0
    assert early.returncode == 130
    assert "expired" not in log.read_text()


def test_a_worker_that_was_suspended_goes_on_where_the_swarm_is_now(run: LiveRun, tmp_path: Path) -> None:
    log = tmp_path / "bob.log"
    with shoal(log, "work", run.url, "--dir", "here", "--name", "bob") as bob:
        before = run.worker_when("bob", bob, log, lambda worker: worker.submissions_accepted > 0)
        bob.send_signal(signal.SIGSTOP)
        run.worker_when("bob", bob, log, lambda worker: worker.state == "gone")
        bob.send_signal(signal.SIGCONT)
        done = before.submissions_accepted
        after = run.worker_when("bob", bob, log, lambda worker: worker.submissions_accepted > done + 1)
        assert after.submissions_rejected == 0
        assert after.state in ("probation", "active")
        assert bob.poll() is None
    assert "Traceback" not in log.read_text()
