"""Brings results from the store's thread to the event loop, many at a time.

Waking a loop from another thread costs more than most results are worth. Those that come while a wake-up is under way travel
with it, so a commit that answers a hundred requests wakes the loop about once.
"""

import asyncio
import contextlib
from collections import deque
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Mailbox:
    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._settled: deque[tuple[asyncio.Future[object], object, BaseException | None]] = deque()
        self._is_under_way = False

    def expect(self) -> "Letter[object]":
        """A place for one result; belongs to the running loop."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._settled, self._is_under_way = loop, deque(), False
        return Letter(self, loop.create_future())

    def post(self, future: "asyncio.Future[object]", result: object, problem: BaseException | None) -> None:
        """Called by the store's thread."""
        assert self._loop is not None, "nobody expects a result"
        self._settled.append((future, result, problem))
        if not self._is_under_way:
            self._is_under_way = True
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everybody who waits
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_under_way = False  # first: what is posted from here on is either seen below or wakes the loop again
        while self._settled:
            future, result, problem = self._settled.popleft()
            if future.done():  # its caller went away
                continue
            if problem is None:
                future.set_result(result)
            else:
                future.set_exception(problem)


class Letter(Generic[Result]):
    """What the store sees of a future of the loop."""

    def __init__(self, mailbox: Mailbox, future: "asyncio.Future[Result]") -> None:
        self._mailbox, self.future = mailbox, future

    def set_running_or_notify_cancel(self) -> bool:
        return not self.future.cancelled()

    def set_result(self, result: Result) -> None:
        self._mailbox.post(self.future, result, None)  # type: ignore[arg-type]  # the future of this very letter

    def set_exception(self, problem: BaseException) -> None:
        self._mailbox.post(self.future, None, problem)  # type: ignore[arg-type]  # as above
