"""Starts confined processes for environments, one per episode, and watches the clock for them.

A `Session` is one episode's environment: it answers calls, or says how the environment failed. One that hangs is killed, and its
failure is marked as limited: on another machine it might not have happened. Sessions may be used from many threads, each one
from one thread at a time.
"""

import atexit
import contextlib
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import UnavailableError
from shoal.tasks.environments.process import MOST_BYTES

START_DEADLINE_S = 120.0
WALL_SLACK = 4.0
"""Seconds by the clock per second of processor time: on a busy machine the processor's limit should decide."""


@dataclass(frozen=True)
class Called:
    """What one call of an environment led to."""

    observation: str = ""
    done: bool = False
    reward: float = 0.0
    failed: str = ""
    """How the environment failed; then the episode is over."""
    limited: bool = False
    """A limit of time or memory decided."""
    cost_s: float = 0.0
    """Processor seconds."""


def _called(found: Any) -> Called:
    """Looks at everything: an environment can write to its connection what the package's own code would never say."""
    if not isinstance(found, dict) or found.keys() - _KINDS.keys():
        raise ValueError
    if not all(isinstance(value, _KINDS[name]) for name, value in found.items()):
        raise ValueError
    called = Called(**found)
    if not math.isfinite(called.reward) or not 0 <= called.cost_s < math.inf:
        raise ValueError
    f"{called.observation}{called.failed}".encode()  # half a surrogate pair could not be encoded later
    return called


_KINDS: dict[str, Any] = {
    "observation": str,
    "done": bool,
    "reward": int | float,
    "failed": str,
    "limited": bool,
    "cost_s": int | float,
}
HUNG = "took too long"
DIED = "died"


class Session:
    def __init__(self, connection: socket.socket, step_s: int) -> None:
        self._connection, self._step_s = connection, step_s
        self._pid = 0

    def reset(self, seed: int, task: Mapping[str, Any]) -> Called:
        return self._ask({"seed": seed, "task": dict(task)})

    def step(self, action: str) -> Called:
        return self._ask({"action": action})

    def close(self) -> None:
        """Also wakes a thread that waits for an answer."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _ask(self, message: dict[str, Any]) -> Called:
        started = time.monotonic()
        deadline = started + WALL_SLACK * self._step_s
        data = json.dumps(message | {"step_s": self._step_s}).encode()
        try:
            self._connection.settimeout(WALL_SLACK * self._step_s)
            if not self._pid:
                self._pid = int(self._receive(deadline)["pid"])
            self._connection.sendall(struct.pack("<I", len(data)) + data)
            return _called(self._receive(deadline))
        except TimeoutError:
            return self._ended(HUNG, time.monotonic() - started)
        except (OSError, EOFError, ValueError, RecursionError):
            # Killed by the kernel: by the limit of processor time in most cases.
            return self._ended(DIED, min(time.monotonic() - started, self._step_s + 1.0))

    def _ended(self, how: str, cost_s: float) -> Called:
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self.close()
        return Called(failed=how, limited=True, cost_s=cost_s)

    def _receive(self, deadline: float) -> Any:
        (size,) = struct.unpack("<I", self._exactly(4, deadline))
        if size > MOST_BYTES:
            raise ValueError
        return json.loads(self._exactly(size, deadline))

    def _exactly(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            more = self._connection.recv(min(size - len(data), 1 << 16))
            if not more:
                raise EOFError
            data += more
        return bytes(data)


class EnvironmentHost:
    """Of one environment: the process that forks its episodes, started when the first one begins."""

    def __init__(
        self,
        name: str,
        *,
        hash_seed: str = "0",
        variables: Mapping[str, str] | None = None,
        folder: str | None = None,
    ) -> None:
        """`variables` and `folder` of its process: only a check of the environment has other ones than usual."""
        self.name, self._hash_seed = name, hash_seed
        self._variables, self._folder = {**_ENVIRONMENT, **(variables or {})}, folder
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the host
        self._control: socket.socket | None = None

    def open(self, step_s: int) -> Session:
        """A fresh environment in a fresh process."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise UnavailableError(f"The environment {self.name} cannot be asked: {error.strerror}.") from None
        with self._lock, theirs:
            for is_last in (False, True):
                try:
                    socket.send_fds(self._started(), [b"o"], [theirs.fileno()])
                    break
                except OSError:
                    self._stop()
                    if is_last:
                        ours.close()
                        raise UnavailableError(
                            f"The process of the environment {self.name} cannot be reached."
                        ) from None
        return Session(ours, step_s)

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _started(self) -> socket.socket:
        if self._control is None:
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "shoal.tasks.environments.process", self.name, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._errors,
                    pass_fds=[theirs.fileno()],
                    cwd=self._folder,
                    env=os.environ
                    | self._variables
                    | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": self._hash_seed},
                )
            self._control = ours
            self._wait_until_ready(ours)
        return self._control

    def _wait_until_ready(self, control: socket.socket) -> None:
        control.settimeout(START_DEADLINE_S)
        try:
            ready = control.recv(1)
        except TimeoutError:
            ready = b""
        if ready != b"r":
            why = self._complaint()
            self._stop()
            raise UnavailableError(f"The process of the environment {self.name} did not start{why}.")

    def _complaint(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read(1 << 20).decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TZ": "UTC", "LC_ALL": "C.UTF-8"}
_hosts: dict[tuple[str, str], EnvironmentHost] = {}
_hosts_lock = threading.Lock()


def shared_host(name: str, hash_seed: str = "0") -> EnvironmentHost:
    """The one of this process, by environment and hash seed."""
    with _hosts_lock:
        if (name, hash_seed) not in _hosts:
            host = _hosts[name, hash_seed] = EnvironmentHost(name, hash_seed=hash_seed)
            atexit.register(host.close)
        return _hosts[name, hash_seed]
