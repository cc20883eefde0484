"""Another terminal's wish: heard from the same user only, whole or not at all, and never mistaken after a kill."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.contributor.control import MAX_BYTES, Control, NoWorkerError, WorkerStatus
from shoal.errors import UnavailableError
from shoal.locks import hold


def test_a_wish_is_heard_and_taken_back(tmp_path: Path) -> None:
    control = Control(tmp_path)
    assert control.wish() == "work"
    control.set_wish("pause")
    assert control.wish() == "pause"
    control.set_wish("work")
    assert control.wish() == "work"
    assert not (tmp_path / "control.json").exists()


def test_a_pause_outlasts_a_restart_and_an_old_finish_does_not(tmp_path: Path) -> None:
    control = Control(tmp_path)
    control.set_wish("pause")
    control.begin()
    assert control.wish() == "pause"
    control.set_wish("finish")
    control.begin()
    assert control.wish() == "work"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"wish": "explode"}',
        b'{"wish": ["pause"]}',
        b'{"wish": {}}',
        b"[" * 60_000,
        b"\xff\xfe",
    ],
)
def test_a_malformed_wish_is_no_wish(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "control.json").write_bytes(content)
    (tmp_path / "control.json").chmod(0o600)
    assert Control(tmp_path).wish() == "work"


def test_a_wish_that_others_could_have_written_is_not_heard(tmp_path: Path) -> None:
    control, path = Control(tmp_path), tmp_path / "control.json"
    control.set_wish("finish")
    path.chmod(0o666)
    assert control.wish() == "work"
    path.chmod(0o600)
    assert control.wish() == "finish"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert control.wish() == "work"
    path.unlink()
    os.mkfifo(path)  # must not hold the worker up
    assert control.wish() == "work"
    path.unlink()
    path.write_bytes(b'{"wish": "pause", "pad": "' + b"x" * MAX_BYTES + b'"}')
    assert control.wish() == "work"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_wish_of_another_user_is_not_heard(tmp_path: Path) -> None:
    control = Control(tmp_path)
    control.set_wish("finish")
    os.chown(tmp_path / "control.json", 12345, 12345)
    assert control.wish() == "work"


def test_without_a_worker_there_is_nobody_to_tell(tmp_path: Path) -> None:
    control = Control(tmp_path)
    control.tell(WorkerStatus(pid=1, state="working"))  # left behind by one that was killed
    acts: list[Callable[[], object]] = [control.status, lambda: control.ask("pause")]
    for act in acts:
        with pytest.raises(NoWorkerError, match=r"No worker runs in .* --dir"):
            act()
    assert control.wish() == "work"


KILLED = """
import os, signal, sys
from pathlib import Path
from shoal.contributor.control import Control, WorkerStatus
from shoal.locks import hold
root = Path(sys.argv[1])
with hold(root / "lock", ""):
    Control(root).tell(WorkerStatus(pid=os.getpid(), state="working"))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_worker_leaves_nothing_that_misleads(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=120)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "working"
    with pytest.raises(NoWorkerError):
        Control(tmp_path).status()


def test_a_worker_that_hears_is_answered_with_what_it_does(tmp_path: Path) -> None:
    control = Control(tmp_path)
    with hold(tmp_path / "lock", ""):
        assert control.status().state == "joining"

        def worker_looks(_: float) -> None:
            control.tell(WorkerStatus(state="resting", reason="paused by you", heard=control.wish()))

        answer = control.ask("pause", sleep=worker_looks)
        assert answer is not None
        assert str(answer).startswith("resting: paused by you; 0 submissions")


def test_a_worker_that_does_not_look_is_named_after_the_deadline_and_the_wish_is_kept(tmp_path: Path) -> None:
    times = iter(range(1000))
    control = Control(tmp_path)
    with hold(tmp_path / "lock", ""), pytest.raises(UnavailableError, match=r"not answered within 20 s; it is joining"):
        control.ask("finish", clock=lambda: float(next(times)), sleep=lambda _: None)
    assert control.wish() == "finish"


def test_a_worker_that_ends_meanwhile_has_finished(tmp_path: Path) -> None:
    control, held = Control(tmp_path), hold(tmp_path / "lock", "")
    held.__enter__()

    def end(_: float) -> None:
        held.__exit__(None, None, None)

    assert control.ask("finish", sleep=end) is None


def test_a_worker_that_ends_between_two_looks_has_finished_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lives while the wish is written and at the first look after it, and at no later one."""
    looks = iter([True, True])
    monkeypatch.setattr(Control, "is_running", lambda _: next(looks, False))
    control = Control(tmp_path)
    assert control.ask("finish", sleep=lambda _: None) is None
    assert next(looks, None) is None
