"""What this machine can do, measured with the engine and the link that will do the work."""

import os
import time
from dataclasses import dataclass

from shoal.config import RolloutConfig
from shoal.metrics.units import size
from shoal.policy.engine import Engine, GenerationRequest
from shoal.policy.memory import memory_in_use
from shoal.protocol import api
from shoal.tasks.workload import WorkItem

DRIFT = 2.0
"""A speed that is off by more than this factor is reported to the coordinator, whose deadlines depend on it."""
NEWEST_SHARE = 0.3
"""How much the newest slot counts in the running mean of the speed."""
FASTEST_LINK_BYTES_S = 1e11
"""What came from a cache arrives in no time."""
PROBE_TOKENS = 8
PROBED_ROWS = (8, 32, 128, 512)
WORTH_MORE_ROWS = 1.5
"""Four times as many samples at a time must be this much faster together, or each would only take longer."""


def is_worth_more_rows(tokens_per_s: float, with_more: float) -> bool:
    return with_more >= WORTH_MORE_ROWS * tokens_per_s


def measure_engine(engine: Engine, item: WorkItem, rollouts: RolloutConfig) -> tuple[int, float]:
    """How many samples at a time this machine should work on, and its speed with them."""
    _probe(engine, item, rollouts, 1)  # the first call pays for warm-up
    rows, tokens_per_s = PROBED_ROWS[0], _probe(engine, item, rollouts, PROBED_ROWS[0])
    for more in PROBED_ROWS[1:]:
        faster = _probe(engine, item, rollouts, more)
        if not is_worth_more_rows(tokens_per_s, faster):
            break
        rows, tokens_per_s = more, faster
    return rows, tokens_per_s


def _probe(engine: Engine, item: WorkItem, rollouts: RolloutConfig, rows: int) -> float:
    tokens = min(PROBE_TOKENS, rollouts.max_new_tokens)
    requests = [GenerationRequest(item.prompt_tokens, item.seed ^ row, tokens) for row in range(rows)]
    started = time.monotonic()
    completions = engine.generate(requests, temperature=rollouts.temperature)
    return sum(len(completion.tokens) for completion in completions) / max(time.monotonic() - started, 1e-6)


def machine_memory() -> int:
    """Bytes of memory; 0 where the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


@dataclass
class Machine:
    tokens_per_s: float
    link_bytes_per_s: float = 0.0
    """0: nothing had to be fetched."""
    memory_bytes: int = 0
    _mean_tokens_per_s: float = 0.0

    @property
    def recent_tokens_per_s(self) -> float:
        return self._mean_tokens_per_s or self.tokens_per_s

    def update_speed(self, tokens: int, seconds: float) -> bool:
        """Takes the speed of one slot into account; true if the reported speed was wrong and is now the measured one."""
        newest = tokens / max(seconds, 1e-6)
        before = self._mean_tokens_per_s or self.tokens_per_s
        self._mean_tokens_per_s = (1 - NEWEST_SHARE) * before + NEWEST_SHARE * newest
        if 1 / DRIFT <= self._mean_tokens_per_s / self.tokens_per_s <= DRIFT:
            return False
        self.tokens_per_s = self._mean_tokens_per_s
        return True

    def registration(self, name: str, numerics_class: str) -> api.RegisterBody:
        return api.RegisterBody(
            name=name,
            numerics_class=numerics_class,
            tokens_per_s=self.tokens_per_s,
            memory_bytes=self.memory_bytes,
            link_bytes_per_s=min(self.link_bytes_per_s, FASTEST_LINK_BYTES_S),
        )

    def line(self) -> str:
        parts = [f"{self.tokens_per_s:,.0f} tokens/s", f"{os.cpu_count()} cores"]
        if self.memory_bytes:
            used = memory_in_use()
            parts.append(f"{size(self.memory_bytes)} of memory ({size(used)} used)")
        if self.link_bytes_per_s:
            parts.append(f"{size(self.link_bytes_per_s)}/s from the relays")
        return ", ".join(parts)
