"""A lock file that one process holds at a time; the kernel releases it when its holder ends, however it ends."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.errors import ShoalError

POLL_INTERVAL_S = 0.05


class BusyError(ShoalError):
    """Another process holds the lock."""

    code = "busy"
    permanent = True


@contextlib.contextmanager
def hold(
    path: Path,
    message: str,
    *,
    hint: str = "",
    wait_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Holds the lock inside; BusyError with this message if another process does and goes on doing so for `wait_s`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    until = clock() + wait_s
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while not _try_lock(handle):
            if clock() >= until:
                raise BusyError(message, hint=hint)
            sleep(POLL_INTERVAL_S)
        yield
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
