"""An answer that many pages ask for at once: computed once, and again when it is old."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")

FRESH_S = 1.0


class Recent(Generic[Value]):
    def __init__(self, fresh_s: float = FRESH_S) -> None:
        self._fresh_s = fresh_s
        self._at, self._value = float("-inf"), list[Value]()
        self._lock = asyncio.Lock()

    async def get(self, compute: Callable[[], Awaitable[Value]]) -> Value:
        async with self._lock:
            clock = asyncio.get_running_loop().time
            if not self._value or clock() - self._at > self._fresh_s:
                self._value, self._at = [await compute()], clock()
            return self._value[0]
