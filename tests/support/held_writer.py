"""A checkpoint writer that stops before its last rename until somebody waits for it, or the test ends."""

import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest


class HeldWriter:
    """Holds the writer from `hold` on. It goes on once the thread of the test waits for a result."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._free = threading.Event()
        self._free.set()
        self.failure: Exception | None = None
        self.interrupt_next_wait = False
        replace, result, tester = os.replace, Future.result, threading.current_thread()

        def held_replace(source: Any, target: Any) -> None:
            if threading.current_thread() is not tester and Path(target).name.startswith("step-"):
                self._free.wait()
                if self.failure is not None:
                    raise self.failure
            replace(source, target)

        def watched_result(future: "Future[Any]", timeout: float | None = None) -> Any:
            if threading.current_thread() is tester:
                if self.interrupt_next_wait:
                    self.interrupt_next_wait = False
                    raise KeyboardInterrupt
                self._free.set()
            return result(future, timeout)

        monkeypatch.setattr("shoal.training.checkpoints.os.replace", held_replace)
        monkeypatch.setattr(Future, "result", watched_result)

    def hold(self) -> None:
        self._free.clear()

    def release(self) -> None:
        self._free.set()
