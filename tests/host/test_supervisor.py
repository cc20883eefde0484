"""The supervisor keeps roles alive, ends with a reason, and leaves nobody behind."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal import tether
from shoal.host.supervisor import (
    RestartPolicy,
    Role,
    RoleEvent,
    Supervisor,
    SupervisorError,
    describe_exit,
    interrupt_on_termination,
    log_tail,
    spawn_role,
)

DEADLINE_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeProcess:
    def __init__(self, pid: int, ends_on: tuple[signal.Signals, ...]) -> None:
        self.pid = pid
        self.exit_code: int | None = None
        self.signals: list[signal.Signals] = []
        self._ends_on = ends_on

    def poll(self) -> int | None:
        return self.exit_code

    def signal_group(self, number: signal.Signals) -> None:
        self.signals.append(number)
        if number in self._ends_on and self.exit_code is None:
            self.exit_code = -number


class Host:
    """A supervisor whose processes live in memory."""

    def __init__(self, *roles: Role, ends_on: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGKILL)) -> None:
        self.clock = Clock()
        self.spawned: list[FakeProcess] = []
        self._ends_on = ends_on
        self.supervisor = Supervisor(roles, spawn=self._spawn, clock=self.clock, sleep=self.clock.sleep)

    def _spawn(self, role: Role) -> FakeProcess:
        self.spawned.append(FakeProcess(1000 + len(self.spawned), self._ends_on))
        return self.spawned[-1]

    def exit(self, code: int) -> list[str]:
        self.spawned[-1].exit_code = code
        return kinds(self.supervisor.poll())

    def wait(self, seconds: float) -> list[str]:
        self.clock.now += seconds
        return kinds(self.supervisor.poll())


def kinds(events: list[RoleEvent]) -> list[str]:
    return [event.kind for event in events]


def role(name: str = "trainer", *, restart: bool = True, essential: bool = True, log: Path = Path("no.log")) -> Role:
    return Role(name, ("true",), log, restart=restart, essential=essential)


def test_clean_exit_is_final() -> None:
    host = Host(role())
    assert host.exit(0) == ["started", "exited"]
    assert host.wait(100) == []
    assert host.supervisor.alive == ()


def test_failed_role_is_restarted_after_a_pause() -> None:
    host = Host(role())
    assert host.exit(1) == ["started", "exited"]
    assert host.supervisor.alive == ("trainer",)
    assert host.wait(0.4) == []
    assert host.wait(0.2) == ["restarted"]
    assert host.supervisor.pid("trainer") == 1001


def test_pauses_grow_and_are_bounded() -> None:
    pauses = [RestartPolicy(first_pause_s=1, last_pause_s=5).pause_s(failures) for failures in range(1, 6)]
    assert pauses == [1, 2, 4, 5, 5]


def test_role_that_keeps_failing_fast_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    log.write_text("first\nOut of memory\n")
    host = Host(role(log=log))
    for _ in range(4):
        host.exit(1)
        host.wait(20)
    with pytest.raises(SupervisorError, match=r"5 times in a row(.|\n)*Out of memory") as caught:
        host.exit(1)
    assert caught.value.code == "role_failed"
    last = host.supervisor.poll()[-1]
    assert (last.kind, last.last_line) == ("failed", "Out of memory")


def test_a_long_life_forgives_earlier_failures() -> None:
    host = Host(role())
    for _ in range(20):
        host.wait(60)
        host.exit(1)
        assert host.wait(0.6) == ["restarted"]


def test_failure_of_an_inessential_role_is_only_an_event() -> None:
    host = Host(role("cheater", restart=False, essential=False))
    assert host.exit(3) == ["started", "exited"]
    assert host.supervisor.alive == ()


def test_essential_role_without_restart_ends_the_run_at_once() -> None:
    host = Host(role(restart=False))
    with pytest.raises(SupervisorError, match="exit code 3"):
        host.exit(3)


def test_wrong_configuration_ends_the_run_at_once_with_one_sentence(tmp_path: Path) -> None:
    log = tmp_path / "coordinator.log"
    log.write_text("--- start\nPort 7300 is taken. Choose another with --coordinator.port.\n")
    host = Host(role("coordinator", log=log))
    with pytest.raises(SupervisorError) as caught:
        host.exit(os.EX_CONFIG)
    assert (
        str(caught.value) == "The coordinator cannot run: Port 7300 is taken. Choose another with --coordinator.port."
    )


def test_roles_that_started_are_stopped_when_a_later_one_cannot_start() -> None:
    spawned: list[FakeProcess] = []

    def spawn(role: Role) -> FakeProcess:
        if role.name == "b":
            raise SupervisorError("no room")
        spawned.append(FakeProcess(1, (signal.SIGTERM,)))
        return spawned[-1]

    with pytest.raises(SupervisorError, match="no room"):
        Supervisor([role("a"), role("b")], spawn=spawn)
    assert spawned[0].exit_code == -signal.SIGTERM


def test_children_of_a_dead_role_are_ended_before_its_restart() -> None:
    host = Host(role())
    host.exit(1)
    assert host.spawned[0].signals == [signal.SIGKILL]


def test_stop_asks_first_and_insists_after_the_deadline() -> None:
    host = Host(role("obedient"), role("stubborn"), ends_on=(signal.SIGKILL,))
    host.spawned[0].exit_code = None
    began = host.clock.now
    host.supervisor.stop(deadline_s=3)
    assert host.clock.now - began == pytest.approx(3, abs=0.1)
    assert [process.signals[:2] for process in host.spawned] == [[signal.SIGTERM, signal.SIGKILL]] * 2


def test_stop_does_not_wait_for_roles_that_left() -> None:
    host = Host(role("a"), role("b"))
    began = host.clock.now
    host.supervisor.stop()
    assert host.clock.now == began
    host.supervisor.stop()


def test_a_second_interrupt_still_kills_everything() -> None:
    host = Host(role(), ends_on=(signal.SIGKILL,))

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    host.supervisor._sleep = interrupted
    with pytest.raises(KeyboardInterrupt):
        host.supervisor.stop()
    assert host.spawned[0].exit_code == -signal.SIGKILL


def test_process_that_cannot_be_killed_is_named() -> None:
    host = Host(role("frozen"), ends_on=())
    with pytest.raises(SupervisorError, match="frozen"):
        host.supervisor.stop()


def test_leaving_the_context_stops_every_role() -> None:
    host = Host(role("a"))
    with pytest.raises(ZeroDivisionError), host.supervisor:
        raise ZeroDivisionError
    assert host.spawned[0].exit_code == -signal.SIGTERM


def test_two_roles_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="trainer"):
        Host(role(), role())


def test_exits_are_described_in_words() -> None:
    assert [describe_exit(code) for code in (2, -9, -99)] == ["exit code 2", "killed by SIGKILL", "killed by signal 99"]


def test_tail_of_a_long_log_is_short_and_of_a_missing_one_says_so(tmp_path: Path) -> None:
    log = tmp_path / "long.log"
    log.write_bytes(b"\xff" * 100_000 + b"".join(b"\nline %d" % number for number in range(100)))
    assert log_tail(log, lines=2) == "  line 98\n  line 99"
    assert "No such file" in log_tail(tmp_path / "missing.log")


def test_termination_is_an_interrupt_inside_the_block_only() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interrupt_on_termination():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


# Real processes. Each child connects to the test and says who it is; its death closes the connection.

CHILD = """
import os, socket, sys, signal, subprocess
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("child speaks", flush=True)
connection.sendall(f"{os.getpid()} {os.getsid(0)}\\n".encode())
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection.sendall(b"deaf\\n")
connection.recv(1)
if "family" in sys.argv:
    subprocess.Popen([sys.executable, "-S", "-c", sys.argv[-1], sys.argv[1]]).wait()
sys.exit(3)
"""

SUPERVISOR = """
import sys
from pathlib import Path
from shoal.host.supervisor import Role, Supervisor
with Supervisor([Role("child", tuple(sys.argv[2:]), Path(sys.argv[1]))]) as supervisor:
    sys.stdin.read()
"""


WITHOUT_KERNEL = """
import os, subprocess, sys
code = "import sys; from shoal import tether; sys.platform = 'other'; tether.WATCH_INTERVAL_S = 0.01; tether.main(sys.argv[1:])"
subprocess.Popen([sys.executable, "-c", code, str(os.getpid()), *sys.argv[1:]], start_new_session=True)
sys.stdin.read()
"""


class Caller:
    """One connected child."""

    def __init__(self, listener: socket.socket) -> None:
        self.connection, _ = listener.accept()
        self.connection.settimeout(DEADLINE_S)
        self._reader = self.connection.makefile()
        self.pid, self.session = (int(word) for word in self.line().split())

    def line(self) -> str:
        return self._reader.readline()

    def is_gone(self) -> bool:
        try:
            return self.line() == ""
        except ConnectionResetError:
            return True


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE_S)
        yield server


def child_command(listener: socket.socket, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", CHILD, str(listener.getsockname()[1]), *words)


def test_real_role_has_its_own_session_and_log_and_is_stopped(tmp_path: Path, listener: socket.socket) -> None:
    log = tmp_path / "logs" / "child.log"
    with Supervisor([Role("child", child_command(listener), log)]) as supervisor:
        child = Caller(listener)
        assert child.session == child.pid == supervisor.pid("child")
    assert child.is_gone()
    start, words = log.read_text().splitlines()
    assert start.startswith("--- ")
    assert words == "child speaks"


def test_real_role_that_was_killed_comes_back(tmp_path: Path, listener: socket.socket) -> None:
    fast = RestartPolicy(first_pause_s=0)
    with Supervisor([Role("child", child_command(listener), tmp_path / "child.log")], policy=fast) as supervisor:
        first = Caller(listener)
        os.kill(first.pid, signal.SIGKILL)
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
        supervisor.poll()
        assert kinds(supervisor.poll()) == ["restarted"]
        assert Caller(listener).pid != first.pid


def test_real_stubborn_role_is_killed_with_all_it_started(tmp_path: Path, listener: socket.socket) -> None:
    command = child_command(listener, "stubborn", "family", CHILD)
    with Supervisor([Role("child", command, tmp_path / "child.log")]) as supervisor:
        parent = Caller(listener)
        assert parent.line() == "deaf\n"
        parent.connection.sendall(b"!")
        grandchild = Caller(listener)
        supervisor.stop(deadline_s=0.05)
        assert parent.is_gone()
        assert grandchild.is_gone()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere roles are ended within a second, by looking")
def test_real_role_dies_with_a_killed_supervisor(tmp_path: Path, listener: socket.socket) -> None:
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "child.log"), *child_command(listener, "stubborn")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as supervisor:
        child = Caller(listener)
        assert child.line() == "deaf\n"
        supervisor.kill()
        assert child.is_gone()


def test_real_role_dies_with_its_supervisor_where_the_kernel_does_not_help(listener: socket.socket) -> None:
    command = [sys.executable, "-c", WITHOUT_KERNEL, *child_command(listener, "stubborn")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as supervisor:
        child = Caller(listener)
        assert child.line() == "deaf\n"
        supervisor.kill()
        supervisor.wait(DEADLINE_S)  # a zombie still looks alive
        assert child.is_gone()


def test_role_whose_supervisor_is_already_gone_does_not_start(tmp_path: Path) -> None:
    nobody = "1" if os.getpid() != 1 else "2"
    command = [sys.executable, "-I", "-S", tether.__file__, nobody, "touch", str(tmp_path / "started")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode != 0
    assert "is gone" in ended.stderr
    assert not (tmp_path / "started").exists()


def test_command_that_does_not_exist_is_named_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    process = spawn_role(Role("child", ("/nowhere/shoal",), log))
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process.poll() == 127
    assert "/nowhere/shoal cannot be started: No such file" in log.read_text()


def test_log_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SupervisorError, match="child cannot be started"):
        spawn_role(Role("child", ("true",), tmp_path / "file" / "child.log"))
