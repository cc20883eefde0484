"""Bounded sets of processes that run reasoning-gym's scorers, and that are killed when they take too long.

Each process is started when it is first needed, answers one request after the other, and is replaced when it had to be killed or
died. A request that no process could answer within its limits has no answer.
"""

import atexit
import json
import os
import queue
import selectors
import subprocess
import sys
import time
from functools import cache
from typing import Any, NamedTuple

from shoal.errors import UnavailableError
from shoal.tasks.verifiers.scorer_process import CPU_LIMIT_S
from shoal.tasks.verifiers.text import Outcome

WALL_LIMIT_S = 20.0
"""Generous: on a busy machine the limit of processor time should decide, which is the same for everybody."""
START_DEADLINE_S = 120.0
OVER_LIMIT = Outcome(0.0, f"comparing the answer took more than {CPU_LIMIT_S} s or too much memory", True, CPU_LIMIT_S)


class ScorerAnswer(NamedTuple):
    reward: float
    cost_s: float


class _Scorer:
    """One process of the pool."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shoal.tasks.verifiers.scorer_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )
        if self._line(START_DEADLINE_S) != b"ready":
            self.close()
            raise UnavailableError(
                f"A process for reasoning-gym answers did not start within {START_DEADLINE_S:.0f} s."
            )

    def ask(self, arguments: tuple[Any, ...], timeout_s: float) -> ScorerAnswer | None:
        """None if the process died or has to be killed; it is of no further use then."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
        except BrokenPipeError:
            return None
        reward, cost_s = json.loads(self._line(timeout_s) or b"[null, null]")
        return ScorerAnswer(reward, cost_s) if isinstance(reward, float) else None

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline, line = time.monotonic() + timeout_s, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return b""
                data = os.read(self._process.stdout.fileno(), 4096)
                if not data:
                    return b""
                line += data
        return line.strip()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


class ScorerPool:
    def __init__(self, size: int, *, timeout_s: float = WALL_LIMIT_S) -> None:
        self._timeout_s = timeout_s
        self._idle: queue.LifoQueue[_Scorer | None] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(None)

    def ask(self, *arguments: Any) -> ScorerAnswer | None:
        """A reward with its cost; None if none was found within the limits. Waits while all processes are busy."""
        scorer = self._idle.get()
        answer = None
        try:
            scorer = scorer or _Scorer()
            answer = scorer.ask(arguments, self._timeout_s)
        finally:
            if scorer is not None and answer is None:
                scorer.close()
                scorer = None
            self._idle.put(scorer)
        return answer

    def close(self) -> None:
        while not self._idle.empty():
            scorer = self._idle.get_nowait()
            if scorer is not None:
                scorer.close()


@cache
def shared_scorers() -> ScorerPool:
    """The processes of this machine, as many as the machine has cores."""
    scorers = ScorerPool(os.cpu_count() or 1)
    atexit.register(scorers.close)
    return scorers
