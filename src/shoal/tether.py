"""Run a command that dies with its supervisor: `python tether.py SUPERVISOR_PID COMMAND …`.

Started by file name with `-I -S`, so it may import nothing but the standard library and costs some 20 ms. On Linux the kernel
kills the command when the supervisor ends, however it ends; elsewhere a small process looks every second and kills the group.
"""

import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
WATCH_INTERVAL_S = 1.0
CANNOT_START = 127


def tether(supervisor_pid: int) -> None:
    """Bind this process, and what it becomes by exec, to the life of its parent."""
    if sys.platform == "linux":
        _ask_kernel()
    elif os.fork() == 0:
        _watch(supervisor_pid)
    # A parent that died before the request above leaves no signal: its pid is then no longer ours to see.
    if os.getppid() != supervisor_pid:
        sys.exit(f"The supervisor {supervisor_pid} is gone.")


def _ask_kernel() -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    # SIGKILL, because nobody is left to insist after a SIGTERM; every role survives being killed.
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl refused: {os.strerror(ctypes.get_errno())}.")


def _watch(supervisor_pid: int) -> None:
    role_pid = os.getppid()
    while os.getppid() == role_pid:
        try:
            os.kill(supervisor_pid, 0)
        except ProcessLookupError:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        time.sleep(WATCH_INTERVAL_S)
    os._exit(0)


def main(arguments: list[str]) -> None:
    tether(int(arguments[0]))
    command = arguments[1:]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}.", file=sys.stderr)
        sys.exit(CANNOT_START)


if __name__ == "__main__":
    main(sys.argv[1:])
