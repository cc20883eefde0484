"""Runs inside the sandbox: executes one program on many inputs, each in a forked child, and reports what came out.

Reads one job (JSON, after its length) from standard input and answers with one line of JSON per test, each followed by the bytes
that the child produced. It never sees an expected output and compares nothing: whatever the program does to this process, it can
only change what is reported about itself. Uses the standard library alone; the package is not visible here.
"""

import atexit
import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import time
import typing
from typing import Any, NoReturn

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_RESULT_FD = 3
_COMPLAINT_BYTES = 300
_LIBC = ctypes.CDLL(None, use_errno=True)
PACKAGES = "/packages"
TYPES = "Any Callable Deque Dict Generator Iterable Iterator List Mapping Optional Sequence Set Tuple Type Union"
"""Names that signatures of contest problems use and that solutions often forget to import."""


def main() -> None:
    drop_privileges()
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    (size,) = struct.unpack("<Q", sys.stdin.buffer.read(8))
    job = json.loads(sys.stdin.buffer.read(size))
    import_packages(job)
    for test in job["inputs"]:
        header, produced = run_test(job, test)
        sys.stdout.buffer.write(json.dumps(header).encode() + b"\n" + produced)
        sys.stdout.buffer.flush()


def import_packages(job: dict[str, Any]) -> None:
    """Once for all tests, where the task allows packages and the program names them."""
    if job["packages"]:
        sys.path.append(PACKAGES)
    for name in job["packages"]:
        if name in job["program"]:
            __import__(name)


def drop_privileges() -> None:
    """A sandbox that root started becomes a user of its own, so that limits per user hold."""
    if len(sys.argv) > 1 and os.getuid() == 0:
        uid = int(sys.argv[1])
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def run_test(job: dict[str, Any], test: Any) -> tuple[dict[str, Any], bytes]:
    started, limits = time.monotonic(), job["limits"]
    output_read, output_write = os.pipe()
    input_read, input_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(output_read)
        os.close(input_write)
        run_child(job, test, input_read, output_write)
    os.close(output_write)
    os.close(input_read)
    text = test.encode() if job["name"] is None else b""
    deadline = started + limits["wall_s"]
    produced, ending = exchange(text, input_write, output_read, deadline, limits["output_bytes"])
    status, usage, ending = reap(child, deadline, ending)
    return describe(status, usage, ending, produced, limits)


def exchange(text: bytes, input_fd: int, output_fd: int, deadline: float, most_bytes: int) -> tuple[bytes, str]:
    """Feeds the child and collects what it writes, until it closes its end, says too much, or takes too long."""
    os.set_blocking(input_fd, False)
    produced, size, writers = [], 0, [input_fd]
    ending = ""
    while True:
        readable, writable, _ = select.select([output_fd], writers, [], max(0.0, deadline - time.monotonic()))
        if writable:
            try:
                text = text[os.write(input_fd, text[:65536]) :] if text else b""
            except BrokenPipeError:
                text = b""
            if not text:
                os.close(writers.pop())
        if readable:
            data = os.read(output_fd, 65536)
            produced.append(data)
            size += len(data)
            ending = "output" if size > most_bytes else ending
            if not data or ending:
                break
        if not readable and not writable:
            ending = "wall"
            break
    for descriptor in (*writers, output_fd):
        os.close(descriptor)
    return b"".join(produced)[:most_bytes], ending


def reap(child: int, deadline: float, ending: str) -> tuple[int, Any, str]:
    pause_s = 0.0002
    while not ending:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return status, usage, ""
        if time.monotonic() >= deadline:
            ending = "wall"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.01)
    os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    return status, usage, ending


def describe(
    status: int, usage: Any, ending: str, produced: bytes, limits: dict[str, Any]
) -> tuple[dict[str, Any], bytes]:
    cpu_s = usage.ru_utime + usage.ru_stime
    if not ending and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        ending = "cpu" if number == signal.SIGXCPU or cpu_s >= limits["cpu_s"] else f"signal {number}"
    return {
        "ending": ending,
        "exit": os.waitstatus_to_exitcode(status),
        "cpu_s": cpu_s,
        "bytes": len(produced),
    }, produced


def run_child(job: dict[str, Any], test: Any, input_fd: int, output_fd: int) -> NoReturn:
    """Never returns: 0 if the program ended well, 1 if it raised, 2 if its value is not JSON, 3 if memory ran out."""
    code, leave = 1, os._exit
    try:
        os.dup2(input_fd, 0)
        os.dup2(output_fd, _RESULT_FD)
        nowhere = os.open("/dev/null", os.O_WRONLY)
        os.dup2(_RESULT_FD if job["name"] is None else nowhere, 1)
        os.dup2(nowhere, 2)
        os.closerange(_RESULT_FD + 1, 256)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout)
        confine(job)
        code = call_function(job, test) if job["name"] is not None else run_script(job)
    except MemoryError:
        code = 3
    except SystemExit as leaving:
        code = end_script(0 if leaving.code in (None, 0) else 1)
    except BaseException as error:
        code = complain(error, job["name"] is not None)
    finally:
        leave(code)


def confine(job: dict[str, Any]) -> None:
    limits = job["limits"]
    for kind, most in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(kind, (most, most))
    if limits["threads"]:
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["threads"], limits["threads"]))
    cpu_s = int(limits["cpu_s"])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    install_filter(bytes.fromhex(job["filter"]))


def install_filter(program: bytes) -> None:
    """Lets this process make no other system calls than those of the filter, for ever; an empty one changes nothing."""
    if not program:
        return

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))

    made = Filter(len(program) // 8, program)
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(made), 0, 0):
        raise OSError(ctypes.get_errno(), "the system-call filter was refused")


def namespace(name: str) -> dict[str, Any]:
    import builtins

    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    sys.argv = ["solution.py"]
    return {"__name__": name, "__builtins__": builtins, **{each: getattr(typing, each) for each in TYPES.split()}}


def run_script(job: dict[str, Any]) -> int:
    exec(compile(job["program"], "solution.py", "exec"), namespace("__main__"))
    return end_script(0)


def end_script(code: int) -> int:
    """What the interpreter does at its end: waits for threads, calls what was registered, writes what is buffered."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    return flush(code)


def call_function(job: dict[str, Any], arguments: list[Any]) -> int:
    names = namespace("solution")
    exec(compile(job["program"], "solution.py", "exec"), names)
    function = names.get(job["name"])
    if function is None:
        function = getattr(names["Solution"](), job["name"])
    value = function(*arguments)
    try:
        data = (json.dumps(value, default=plain) if job["packages"] else json.dumps(value)).encode()
    except (TypeError, ValueError):
        return 2
    while data:
        data = data[os.write(_RESULT_FD, data) :]
    return 0


def plain(value: Any) -> Any:
    """Numbers and arrays of numpy as JSON has them."""
    if type(value).__module__ != "numpy":
        raise TypeError
    return value.tolist()


def flush(code: int) -> int:
    try:
        sys.stdout.flush()
    except BaseException:
        return 1
    return code


def complain(error: BaseException, called: bool) -> int:
    """What was raised, as the reason of the reward; a script's output stays as it is."""
    if called:
        text = f"{type(error).__name__}: {error}"[:_COMPLAINT_BYTES]
        os.write(_RESULT_FD, text.encode(errors="replace"))
    return 1


if __name__ == "__main__":
    main()
