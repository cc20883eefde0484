"""Commands as somebody types them, each in a directory of its own, and waits for what they say and do, with a deadline on each."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from end_to_end.swarm import DEADLINE_S, LOOK_INTERVAL_S
from shoal.errors import UnavailableError
from shoal.protocol.api import StatusView
from shoal.protocol.client import CoordinatorClient

Found = TypeVar("Found")
ANSWER_DEADLINE_S = 5.0


@contextmanager
def shoal(
    log: Path, *arguments: object, inside: Sequence[str] = (), here: Path | None = None, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """One command with its output in a file; ended with the block. `inside` are words that come before it.

    It runs in a new directory of its own unless `here` names one.
    """
    home = here or log.parent / log.stem
    home.mkdir(exist_ok=here is not None)
    command = [*inside, sys.executable, "-m", "shoal", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"} | variables
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=home, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(DEADLINE_S)


def answer(
    *arguments: object, here: Path = Path("/"), expect: int = 0, inside: Sequence[str] = (), **variables: str
) -> str:
    """What a command prints that ends by itself."""
    result = subprocess.run(
        [*inside, sys.executable, "-m", "shoal", *map(str, arguments)],
        cwd=here,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | variables,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    said = result.stdout + result.stderr
    assert result.returncode == expect, said
    assert "Traceback" not in said
    return said


def eventually(look: Callable[[], Found | None], what: Callable[[], str], deadline_s: float = DEADLINE_S) -> Found:
    """The first thing that is found; `what` says what was missing."""
    until = time.monotonic() + deadline_s
    while (found := look()) is None:
        assert time.monotonic() < until, what()
        time.sleep(LOOK_INTERVAL_S)
    return found


def wait_for_text(log: Path, text: str) -> None:
    eventually(
        lambda: True if text in log.read_text() else None,
        lambda: f"{text!r} never came; {log.name} says:\n{log.read_text()[-2000:]}",
    )


def status_of(url: str) -> StatusView | None:
    with CoordinatorClient(url, None, deadline_s=ANSWER_DEADLINE_S) as client:
        try:
            return client.status()
        except UnavailableError:
            return None


def status_when(url: str, what: str, holds: Callable[[StatusView], bool]) -> StatusView:
    def look() -> StatusView | None:
        status = status_of(url)
        return status if status is not None and holds(status) else None

    return eventually(look, lambda: f"{what} did not happen")
