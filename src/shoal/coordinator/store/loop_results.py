"""Brings results from the store's thread to the event loop, many at a time.

Waking a loop from another thread costs more than most results. Results that arrive while a wake-up is under way share it, so a
commit that answers a hundred requests wakes the loop about once.
"""

import asyncio
import contextlib
from collections import deque
from typing import Generic, TypeVar

Result = TypeVar("Result")


class LoopResults:
    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._settled: deque[tuple[asyncio.Future[object], object, BaseException | None]] = deque()
        self._is_waking = False

    def expect(self) -> "LoopFuture[object]":
        """A future of the running loop, for one result."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._settled, self._is_waking = loop, deque(), False
        return LoopFuture(self, loop.create_future())

    def settle(self, future: "asyncio.Future[object]", result: object, problem: BaseException | None) -> None:
        """Called by the store's thread."""
        assert self._loop is not None, "no result is expected"
        self._settled.append((future, result, problem))
        if not self._is_waking:
            self._is_waking = True
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everybody who waits
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_waking = False  # first: what is settled from here on is either seen below or wakes the loop again
        while self._settled:
            future, result, problem = self._settled.popleft()
            if future.done():  # its caller went away
                continue
            if problem is None:
                future.set_result(result)
            else:
                future.set_exception(problem)


class LoopFuture(Generic[Result]):
    """What the store sees of a future of the loop."""

    def __init__(self, results: LoopResults, future: "asyncio.Future[Result]") -> None:
        self._results, self.future = results, future

    def set_running_or_notify_cancel(self) -> bool:
        return not self.future.cancelled()

    def set_result(self, result: Result) -> None:
        self._results.settle(self.future, result, None)  # type: ignore[arg-type]  # this very future

    def set_exception(self, problem: BaseException) -> None:
        self._results.settle(self.future, None, problem)  # type: ignore[arg-type]  # as above
