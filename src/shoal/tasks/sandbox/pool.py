"""Many sandboxes at once, at most as many as the machine has cores, with fresh ones started ahead of need.

A sandbox is used once, so no program meets what another left behind. One thread starts them all: the kernel ends a sandbox with
the thread that started it, so a thread that came and went would take its sandboxes along.
"""

import atexit
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from shoal.errors import UnavailableError
from shoal.tasks.sandbox.sandbox import Sandbox, SandboxError

WAIT_LIMIT_S = 600.0


class SandboxPool:
    def __init__(self, size: int | None = None, packages: tuple[str, ...] = ()) -> None:
        self._packages = packages
        self.size = size or os.cpu_count() or 1
        self._free = threading.BoundedSemaphore(self.size)
        self._ready: queue.Queue[Sandbox | SandboxError] = queue.Queue()
        self._closed = threading.Event()
        self._spares = threading.Semaphore(self.size)
        self._starter = threading.Thread(target=self._start_ahead, name="sandbox-starter", daemon=True)
        self._starter.start()

    @contextmanager
    def sandbox(self) -> Iterator[Sandbox]:
        """A fresh sandbox, closed afterwards; waits while all are in use."""
        if not self._free.acquire(timeout=WAIT_LIMIT_S):
            raise UnavailableError(f"All {self.size} sandboxes have been busy for {WAIT_LIMIT_S:.0f} s.")
        try:
            made = self._take()
            try:
                yield made
            finally:
                made.close()
        finally:
            self._free.release()

    def close(self) -> None:
        """Ends the sandboxes that wait; those in use end with their users."""
        self._closed.set()
        self._spares.release()
        self._drain()
        self._starter.join()
        self._drain()

    def _take(self) -> Sandbox:
        made = self._ready.get(timeout=WAIT_LIMIT_S)
        self._spares.release()
        if isinstance(made, SandboxError):
            raise made
        return made

    def _start_ahead(self) -> None:
        while not self._closed.is_set():
            self._spares.acquire()
            if self._closed.is_set():
                return
            try:
                made: Sandbox | SandboxError = Sandbox(self._packages)
            except SandboxError as error:
                made = error
            self._ready.put(made)

    def _drain(self) -> None:
        while True:
            try:
                made = self._ready.get_nowait()
            except queue.Empty:
                return
            if isinstance(made, Sandbox):
                made.close()


@cache
def shared_pool(packages: tuple[str, ...] = ()) -> SandboxPool:
    """The pool of this process for programs with these packages, as large as the machine has cores."""
    pool = SandboxPool(packages=packages)
    atexit.register(pool.close)
    return pool
