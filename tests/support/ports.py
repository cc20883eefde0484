"""Ports for programs that tests start: a free one, and the moment when somebody listens on it."""

import socket
import subprocess
import time

PATIENCE_S = 120.0
POLL_S = 0.05


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(program: str, port: int, process: "subprocess.Popen[bytes] | None" = None) -> None:
    """Returns when the program listens; a program of others tells nobody, so it has to be tried."""
    deadline = time.monotonic() + PATIENCE_S
    while not _listens(port):
        assert process is None or process.poll() is None, f"{program} ended with {process and process.returncode}"
        assert time.monotonic() < deadline, f"{program} does not listen on {port}"
        time.sleep(POLL_S)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
