"""Two processes never share what only one may use."""

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.locks import BusyError, hold

HOLDER = """
import sys
from pathlib import Path
from shoal.locks import hold
with hold(Path(sys.argv[1]), "busy"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_holder_is_refused_with_the_sentence(tmp_path: Path) -> None:
    with (
        hold(tmp_path / "lock", "first"),
        pytest.raises(BusyError, match=r"In use\. Choose another\."),
        hold(tmp_path / "lock", "In use.", hint="Choose another."),
    ):
        pass


def test_a_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        with hold(tmp_path / "deep" / "lock", "busy"):
            pass


def test_a_process_that_waits_gets_the_lock_when_it_is_free(tmp_path: Path) -> None:
    first = hold(tmp_path / "lock", "busy")
    first.__enter__()
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            first.__exit__(None, None, None)

    with hold(tmp_path / "lock", "busy", wait_s=10.0, clock=lambda: 0.0, sleep=nap):
        assert len(naps) == 3


def test_a_killed_holder_leaves_no_lock_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BusyError), hold(tmp_path / "lock", "busy"):
            pass
        holder.kill()
        holder.wait(30)
    with hold(tmp_path / "lock", "busy"):
        pass
