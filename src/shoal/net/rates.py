"""How often one key or one address may do something: token buckets in memory, bounded in number.

A bucket fills at `per_s` up to `burst`; every request takes the tokens that its route costs. If too few are left, the answer says
when there will be enough. Full buckets are dropped first, so remembering costs nothing to those within their rate.
"""

from collections import OrderedDict
from collections.abc import Callable

BURST_S = 3.0
"""A bucket holds the tokens of this many seconds: a worker that wakes up may catch up."""
MAX_BUCKETS = 100_000
ROUNDING = 1e-6


class RateLimit:
    def __init__(
        self, per_s: float, clock: Callable[[], float], *, burst: float = 0.0, capacity: int = MAX_BUCKETS
    ) -> None:
        """`burst` 0 means that of three seconds."""
        self._per_s, self._burst = per_s, max(1.0, burst or BURST_S * per_s)
        self._clock, self._capacity = clock, capacity
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def is_spent(self, name: str) -> bool:
        """Whether not even the cheapest request would pass now; takes nothing."""
        tokens, at = self._buckets.get(name, (self._burst, 0.0))
        return bool(self._per_s) and tokens + max(0.0, self._clock() - at) * self._per_s < 1.0 - ROUNDING

    def give_back(self, name: str, tokens: float) -> None:
        """What was taken for something that turned out to be of use."""
        if name in self._buckets:
            left, at = self._buckets[name]
            self._buckets[name] = (min(self._burst, left + tokens), at)

    def wait_s(self, name: str, cost: float = 1.0) -> float:
        """Takes the tokens: 0 if there were enough, else the seconds until there are. A rate of 0 limits nobody."""
        if not self._per_s:
            return 0.0
        now = self._clock()
        tokens, at = self._buckets.pop(name, (self._burst, now))
        tokens = min(self._burst, tokens + max(0.0, now - at) * self._per_s)
        cost = min(cost, self._burst)  # the most expensive request passes once the bucket is full
        missing = max(0.0, cost - tokens)
        if missing < ROUNDING:
            tokens, missing = tokens - cost, 0.0
        self._buckets[name] = (tokens, now)
        if len(self._buckets) > self._capacity:
            self._buckets.popitem(last=False)
        return missing / self._per_s
