"""How much one key and one address may ask: token buckets in memory, bounded in number.

A bucket fills at `per_s` up to `burst` and every request takes one token. Whoever finds it empty is told when the next one comes.
Buckets that are full again are forgotten first, so remembering costs nothing to those who behave.
"""

from collections import OrderedDict
from collections.abc import Callable

BURST_S = 3.0
"""A bucket holds what comes in so many seconds: a worker that wakes up may catch up."""
MAX_BUCKETS = 100_000
ROUNDING = 1e-6


class RateLimit:
    def __init__(self, per_s: float, clock: Callable[[], float], *, capacity: int = MAX_BUCKETS) -> None:
        self._per_s, self._burst = per_s, max(1.0, BURST_S * per_s)
        self._clock, self._capacity = clock, capacity
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, name: str) -> float:
        """Takes a token: 0 if there was one, else the seconds until there will be. A rate of 0 limits nobody."""
        if not self._per_s:
            return 0.0
        now = self._clock()
        tokens, at = self._buckets.pop(name, (self._burst, now))
        tokens = min(self._burst, tokens + max(0.0, now - at) * self._per_s)
        missing = max(0.0, 1.0 - tokens)
        if missing < ROUNDING:
            tokens, missing = tokens - 1.0, 0.0
        self._buckets[name] = (tokens, now)
        if len(self._buckets) > self._capacity:
            self._buckets.popitem(last=False)
        return missing / self._per_s
