"""How much one client, and all together, may take: connections, requests under way, bytes per second.

All numbers are per process; what is not limited costs nothing.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_KNOWN_CLIENTS = 4096
BODIES_AT_ONCE = 4


@dataclass(frozen=True)
class ServerLimits:
    """Rates are bytes per second; 0 means unlimited."""

    requests_per_client: int = 256
    requests_total: int = 2048
    connections_per_client: int = 512
    connections_total: int = 4096
    bytes_s_per_client: float = 0
    bytes_s_total: float = 0
    first_request_within_s: float = 30.0
    """A connection that says nothing for this long is closed."""
    stalled_after_s: float = 60.0
    """A client that takes no byte for this long is cut off."""


class TokenBucket:
    """Bytes that may be sent: refilled at a steady rate, up to a quarter of a second of it."""

    def __init__(self, bytes_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_s = bytes_s
        self._clock = clock
        self._level = bytes_s / 4
        self._at = clock()

    def delay(self, size_bytes: int) -> float:
        """Take bytes and return how long to wait before sending them; the level may go below zero."""
        if self._bytes_s <= 0:
            return 0.0
        now = self._clock()
        self._level = min(self._bytes_s / 4, self._level + (now - self._at) * self._bytes_s) - size_bytes
        self._at = now
        return max(0.0, -self._level / self._bytes_s)

    @property
    def full(self) -> bool:
        return self.delay(0) == 0.0 and self._level >= self._bytes_s / 4


class Throttle:
    """Bytes per second for all clients together and for each of them.

    Under a limit for all, a few bodies are sent at a time and the others queue: a shard that is whole early can be passed on
    while many halves cannot.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._turns = asyncio.Semaphore(BODIES_AT_ONCE if limits.bytes_s_total > 0 else limits.requests_total + 1)
        self._all = TokenBucket(limits.bytes_s_total)
        self._clients: dict[str, TokenBucket] = {}

    @property
    def active(self) -> bool:
        return self._limits.bytes_s_per_client > 0 or self._limits.bytes_s_total > 0

    def turn(self) -> asyncio.Semaphore:
        return self._turns

    async def take(self, client: str, size_bytes: int) -> None:
        if self.active:
            delay_s = max(self._all.delay(size_bytes), self._bucket(client).delay(size_bytes))
            if delay_s > 0:
                await asyncio.sleep(delay_s)

    def _bucket(self, client: str) -> TokenBucket:
        if len(self._clients) > MAX_KNOWN_CLIENTS:
            self._clients = {name: bucket for name, bucket in self._clients.items() if not bucket.full}
        return self._clients.setdefault(client, TokenBucket(self._limits.bytes_s_per_client))
