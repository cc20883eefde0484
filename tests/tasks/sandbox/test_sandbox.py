"""Escape attempts, all of which must fail, and what the sandbox promises to honest programs."""

import os
import platform
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.tasks.sandbox import sandbox
from shoal.tasks.sandbox.pool import SandboxPool
from shoal.tasks.sandbox.sandbox import LIMITS, Job, Ran, Sandbox, SandboxError, require_sandbox, sandbox_complaint
from shoal.tasks.verifiers.programs import CodeTest, run_tests
from tasks.sandbox.escapes import QUIET_ATTEMPTS

pytestmark = pytest.mark.skipif(bool(sandbox_complaint()), reason=f"{sandbox_complaint()}: run `make system`")
QUICK = replace(LIMITS, cpu_s=1, wall_s=5.0)


def run(program: str, *inputs: str, limits: sandbox.SandboxLimits = LIMITS) -> list[Ran]:
    with Sandbox() as made:
        return list(made.run(Job(textwrap.dedent(program), inputs or ("",), limits=limits)))


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.settimeout(0.01)
        yield listening


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the attempts name system calls by their number on x86_64")
@pytest.mark.parametrize("name", QUIET_ATTEMPTS)
def test_an_escape_fails(name: str, listener: socket.socket, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    program = QUIET_ATTEMPTS[name].replace("PORT", str(listener.getsockname()[1])).replace("SECRET", str(secret))
    (result,) = run(program, limits=replace(LIMITS, cpu_s=2))
    assert b"ESCAPED" not in result.produced
    assert secret.read_text() == "secret"
    assert os.stat(secret).st_nlink == 1


def test_nobody_reached_the_listener(listener: socket.socket) -> None:
    run(f"import socket; socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}), 2)")
    with pytest.raises(TimeoutError):
        listener.accept()


def test_there_are_more_than_25_attempts() -> None:
    assert len(QUIET_ATTEMPTS) > 25


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "pow(3, 10**9)",
    ],
)
def test_endless_computing_ends(program: str) -> None:
    (result,) = run(program, limits=replace(LIMITS, cpu_s=1, wall_s=30.0))
    assert result.limited
    assert result.ending in ("cpu", "wall")


@pytest.mark.parametrize(
    "program", ["import time; time.sleep(1000)", "import os, time\nos.close(1); os.close(3)\ntime.sleep(1000)"]
)
def test_sleeping_ends_with_the_deadline(program: str) -> None:
    (result,) = run(program, limits=replace(LIMITS, wall_s=0.3))
    assert (result.ending, result.limited) == ("wall", True)


def test_a_whole_job_has_a_deadline_too() -> None:
    limits = replace(LIMITS, job_wall_s=1.0)
    results = run("import time; time.sleep(1000)", *[""] * 5, limits=limits)
    assert [result.ending for result in results] == ["wall"]


def test_huge_output_is_cut_off() -> None:
    (result,) = run("while True: print('x' * 10**6)")
    assert result.ending == "output"
    assert len(result.produced) <= LIMITS.output_bytes


def test_an_input_that_nobody_reads_does_not_block() -> None:
    results = run("print(1)", "x" * (8 << 20), "y")
    assert [result.produced for result in results] == [b"1\n", b"1\n"]


def test_what_a_program_kills_is_only_its_own_verdict() -> None:
    results = run("import os, signal\nprint(5, flush=True)\nos.kill(os.getppid(), signal.SIGKILL)\n1 / 0", "", "")
    assert [(result.exit_code, result.produced) for result in results] == [(1, b"5\n")] * 2


def test_a_later_job_finds_nothing_of_an_earlier_one() -> None:
    run("open('/tmp/note', 'w').write('x')")
    (result,) = run("import os; print(os.listdir('/tmp'))")
    assert result.produced == b"[]\n"


def test_the_expected_outputs_are_nowhere_inside() -> None:
    hunt = """
        import gc, os, sys
        marker = 'mackerel'[:4] + 'EREL'
        frame, seen = sys._getframe(), []
        while frame:
            seen.append(repr(frame.f_locals) + repr(frame.f_globals))
            frame = frame.f_back
        seen += [repr(thing) for thing in gc.get_objects() if isinstance(thing, (dict, list, tuple)) and len(thing) < 1000]
        seen += [name for _, _, names in os.walk('/tmp') for name in names] + [input()]
        print('mackEREL' if any(marker in text for text in seen if 'marker' not in text) else 'nothing')
    """
    test = CodeTest(kind="stdin_stdout", input="go", output="mackEREL\n")
    result = run_tests(textwrap.dedent(hunt).replace("print('mackEREL'", "print(marker"), [test])
    assert result.why == "test 1 of 1: wrote nothing, expected mackEREL"


def test_a_program_that_patches_the_runner_harms_only_itself() -> None:
    patch = """
        import json, os, sys
        os._exit = lambda code: None
        json.dumps = lambda *a, **k: '{"ending": "", "exit": 0, "cpu_s": 0, "bytes": 0}'
        frame = sys._getframe()
        while frame.f_back:
            frame = frame.f_back
        frame.f_globals['describe'] = lambda *a: None
        frame.f_globals['run_test'] = lambda *a: None
        print(int(input()) + 1)
    """
    assert [result.produced for result in run(patch, "1", "2")] == [b"2\n", b"3\n"]


def test_honest_programs_have_threads_files_recursion_and_text() -> None:
    honest = """
        import sys, threading
        sys.setrecursionlimit(10**6)
        threading.stack_size(64 << 20)
        def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
        def main():
            open('note', 'w').write('ü')
            print(depth(20000), open('note').read(), sum(map(int, sys.stdin.read().split())))
        thread = threading.Thread(target=main); thread.start(); thread.join()
    """
    (result,) = run(honest, "1 2\n3")
    assert (result.produced.decode(), result.exit_code) == ("20000 ü 6\n", 0)


@pytest.mark.parametrize(
    ("ending", "code"), [("exit()", 0), ("quit(0)", 0), ("import sys; sys.exit(4)", 1), ("1/0", 1)]
)
def test_the_way_a_script_ends_is_reported(ending: str, code: int) -> None:
    (result,) = run(f"print(5)\n{ending}")
    assert (result.exit_code, result.ending) == (code, "")


def test_a_pool_runs_many_and_reuses_none() -> None:
    pool = SandboxPool(2)
    try:
        for _ in range(4):
            with pool.sandbox() as made:
                (result,) = made.run(Job("import os; print(os.listdir('/tmp')); open('/tmp/x', 'w')", [""]))
                assert result.produced == b"[]\n"
    finally:
        pool.close()


def test_ordinary_users_have_a_sandbox_too(tmp_path: Path) -> None:
    """A user namespace without privileges stands for an ordinary login; bubblewrap then makes one of its own."""
    unshare = shutil.which("unshare")
    if unshare is None or os.getuid() != 0:
        pytest.skip("already an ordinary user, or no `unshare` here")
    script = (
        "from shoal.tasks.sandbox.sandbox import *\nimport os\nassert os.getuid() == 1000\n"
        "assert not sandbox_complaint(), sandbox_complaint()\n"
        "with Sandbox() as s:\n    print(list(s.run(Job('import os\\nprint(os.getuid(), flush=True)\\nos.fork()', ['']))))\n"
    )
    command = [unshare, "--user", "--map-user=1000", "--map-group=1000", sys.executable, "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "HOME": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    assert "65534" in done.stdout
    assert "exit_code=1" in done.stdout


def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SandboxError, match="Install bubblewrap"):
        Sandbox()
    sandbox_complaint.cache_clear()
    try:
        with pytest.raises(SandboxError, match="bubblewrap is not installed"):
            require_sandbox()
    finally:
        sandbox_complaint.cache_clear()


def test_a_sandbox_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_fixed_arguments", lambda: ("--no-such-option",))
    with Sandbox() as made, pytest.raises(SandboxError, match="no-such-option"):
        list(made.run(Job("", [""])))
