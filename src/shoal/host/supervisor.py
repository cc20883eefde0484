"""Starts, watches, restarts and stops the roles of one host.

Each role is its own session, so Ctrl-C reaches the supervisor alone; stopping asks every process group with SIGTERM and, after
one deadline, ends what is left with SIGKILL. Roles die with the supervisor even if it is killed. A role that exits with 0 has
finished; another exit is followed by a restart after a growing pause, and by SupervisorError when it keeps failing fast or
says by its exit code that a restart cannot help.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal, Protocol

from shoal import tether
from shoal.errors import ShoalError

PERMANENT_EXIT_CODES = (2, os.EX_CONFIG)
"""Wrong usage and wrong configuration: the next try would end the same way."""
STOP_DEADLINE_S = 5.0
KILL_DEADLINE_S = 60.0
"""A killed process is gone only when its memory is: that of a large model, on a busy machine, takes its time."""
POLL_INTERVAL_S = 0.02
TAIL_LINES = 15
TAIL_BYTES = 8192
START_LINE_CHARS = 500


class SupervisorError(ShoalError):
    """A role without which the run cannot go on has failed for good; the message ends with its last words."""

    code = "role_failed"
    permanent = False


@dataclass(frozen=True)
class Role:
    """One process to keep alive."""

    name: str
    command: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the supervisor."""
    restart: bool = True
    """False: the first exit is final. Exit code 0 always is."""
    essential: bool = True
    """False: its failure is an event, not the end of the run."""


@dataclass(frozen=True)
class RestartPolicy:
    first_pause_s: float = 0.5
    last_pause_s: float = 15.0
    fast_failure_s: float = 30.0
    """A role that lived longer is believed to have worked: its failures are counted from the beginning again."""
    max_fast_failures: int = 5

    def pause_s(self, fast_failures: int) -> float:
        return min(self.first_pause_s * 2.0 ** max(0, fast_failures - 1), self.last_pause_s)


EventKind = Literal["started", "exited", "restarted", "failed"]


@dataclass(frozen=True)
class RoleEvent:
    at_s: float
    """Seconds since the supervisor was made."""
    role: str
    kind: EventKind
    detail: str = ""
    exit_code: int | None = None
    last_line: str = ""
    """Of the log, where a role has failed: usually its reason."""

    @property
    def text(self) -> str:
        verb = self.kind.replace("_", " ")
        return f"{self.role} {verb}: {self.detail}" if self.detail else f"{self.role} {verb}"


class Process(Protocol):
    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it lives."""

    def signal_group(self, number: signal.Signals) -> None: ...


@dataclass
class _Watched:
    role: Role
    process: Process | None = None
    started_at: float = 0.0
    restart_at: float | None = None
    fast_failures: int = 0
    starts: int = 0
    finished: bool = False


class Supervisor:
    """Owns processes; `poll` often, from the thread that made it: the kernel ties children to the thread that starts them."""

    def __init__(
        self,
        roles: Sequence[Role] = (),
        *,
        policy: RestartPolicy | None = None,
        spawn: Callable[[Role], Process] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._policy = policy or RestartPolicy()
        self._spawn = spawn or spawn_role
        self._clock, self._sleep = clock, sleep
        self._born_at = clock()
        self._watched: dict[str, _Watched] = {}
        self._unread: list[RoleEvent] = []
        try:
            for role in roles:
                self.add(role)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def add(self, role: Role) -> None:
        """Start a role now."""
        if role.name in self._watched:
            raise ValueError(f"two roles are named {role.name}")
        watched = self._watched[role.name] = _Watched(role)
        self._start(watched)

    @property
    def alive(self) -> tuple[str, ...]:
        """Roles that run, or will after a pause."""
        return tuple(name for name, watched in self._watched.items() if not watched.finished)

    def pid(self, name: str) -> int | None:
        process = self._watched[name].process
        return process.pid if process else None

    def poll(self) -> list[RoleEvent]:
        """Notice exits, restart what is due and return what happened since the last call; never blocks.

        Raises SupervisorError once when an essential role has failed for good; the events up to then come with the next call.
        """
        for watched in self._watched.values():
            self._check(watched)
        events, self._unread = self._unread, []
        return events

    def stop(self, deadline_s: float = STOP_DEADLINE_S) -> None:
        """End every role and whatever it started. A second Ctrl-C cuts the waiting short, not the stopping."""
        try:
            self._signal_all(signal.SIGTERM)
            self._wait_all(deadline_s)
        finally:
            self._signal_all(signal.SIGKILL)
            survivors = self._wait_all(KILL_DEADLINE_S)
        if survivors:
            raise SupervisorError(f"{', '.join(survivors)} could not be stopped.", hint="Look at them with `ps -ef`.")

    def _check(self, watched: _Watched) -> None:
        if watched.process is not None:
            exit_code = watched.process.poll()
            if exit_code is not None:
                self._handle_exit(watched, exit_code)
        elif watched.restart_at is not None and self._clock() >= watched.restart_at:
            self._start(watched)

    def _start(self, watched: _Watched) -> None:
        watched.process = self._spawn(watched.role)
        watched.started_at, watched.restart_at = self._clock(), None
        watched.starts += 1
        kind: EventKind = "started" if watched.starts == 1 else "restarted"
        self._note(watched, kind, f"pid {watched.process.pid}")

    def _handle_exit(self, watched: _Watched, exit_code: int) -> None:
        """Decide what follows an exit: nothing, a restart after a pause, or the end of the run."""
        assert watched.process is not None
        watched.process.signal_group(signal.SIGKILL)  # what the role itself had started
        watched.process = None
        self._note(watched, "exited", describe_exit(exit_code), exit_code)
        if exit_code == 0:
            watched.finished = True
            return
        fast = self._clock() - watched.started_at < self._policy.fast_failure_s
        watched.fast_failures = watched.fast_failures + 1 if fast else 1
        if not watched.role.restart and not watched.role.essential:
            watched.finished = True
        elif self._may_restart(watched, exit_code):
            watched.restart_at = self._clock() + self._policy.pause_s(watched.fast_failures)
        else:
            self._fail(watched, exit_code)

    def _may_restart(self, watched: _Watched, exit_code: int) -> bool:
        permanent = exit_code in PERMANENT_EXIT_CODES
        return watched.role.restart and not permanent and watched.fast_failures < self._policy.max_fast_failures

    def _fail(self, watched: _Watched, exit_code: int) -> None:
        watched.finished = True
        role, times = watched.role, watched.fast_failures
        how = describe_exit(exit_code) + (f", {times} times in a row" if times > 1 else "")
        last_line = log_tail(role.log, lines=1).strip().removeprefix("shoal: ")
        self._note(watched, "failed", how, exit_code, last_line)
        if not role.essential:
            return
        if exit_code in PERMANENT_EXIT_CODES:
            raise SupervisorError(f"The {role.name} cannot run: {last_line}")
        raise SupervisorError(
            f"The {role.name} failed ({how}). The last lines of {role.log}:\n{log_tail(role.log)}",
            hint="\nStart the run again when the cause is gone; it resumes where it was.",
        )

    def _note(
        self, watched: _Watched, kind: EventKind, detail: str, exit_code: int | None = None, last_line: str = ""
    ) -> None:
        event = RoleEvent(self._clock() - self._born_at, watched.role.name, kind, detail, exit_code, last_line)
        self._unread.append(event)

    def _signal_all(self, number: signal.Signals) -> None:
        for watched in self._watched.values():
            watched.finished = True
            if watched.process is not None:
                watched.process.signal_group(number)

    def _wait_all(self, deadline_s: float) -> list[str]:
        """Names of the roles that still live after the deadline."""
        until = self._clock() + deadline_s
        while survivors := [name for name, watched in self._watched.items() if not self._reap(watched)]:
            if self._clock() >= until:
                break
            self._sleep(POLL_INTERVAL_S)
        return survivors

    def _reap(self, watched: _Watched) -> bool:
        if watched.process is None:
            return True
        exit_code = watched.process.poll()
        if exit_code is None:
            return False
        watched.process.signal_group(signal.SIGKILL)
        watched.process = None
        self._note(watched, "exited", "stopped", exit_code)
        return True


class _Session:
    """A real process that leads its own session."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def spawn_role(role: Role) -> Process:
    """Start the command tethered to this process, its output appended to its log after one line that says so."""
    try:
        role.log.parent.mkdir(parents=True, exist_ok=True)
        with role.log.open("ab") as log:
            log.write(_start_line(role).encode())
            log.flush()
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *role.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **role.env},
                start_new_session=True,
            )
    except OSError as error:
        hint = "Check that the directory of its log can be written to."
        raise SupervisorError(f"The {role.name} cannot be started: {error}.", hint=hint) from None
    return _Session(process)


def _start_line(role: Role) -> str:
    words = " ".join(shlex.join(role.command).split())
    return f"--- {datetime.now().isoformat(timespec='seconds')} {words[:START_LINE_CHARS]}\n"


def describe_exit(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def log_tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, indented."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"  (it cannot be read: {error.strerror})"
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])


@contextlib.contextmanager
def interrupt_on_termination() -> Iterator[None]:
    """Inside, SIGTERM and a closed terminal raise KeyboardInterrupt like Ctrl-C, so that `with Supervisor()` can clean up."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
