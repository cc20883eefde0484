"""How far a fetch is: numbers for machines, one line for people, and the moment to give it up for something newer."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field


class SupersededError(Exception):
    """A newer version costs less than what is left of this one; never leaves this package."""


@dataclass
class Progress:
    version: int
    bytes_total: int
    bytes_done: int = 0
    clock: Callable[[], float] = time.monotonic
    started: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def bytes_left(self) -> int:
        return self.bytes_total - self.bytes_done

    @property
    def bytes_s(self) -> float:
        return self.bytes_done / max(self.clock() - self.started, 1e-6)

    def line(self) -> str:
        share = self.bytes_done / self.bytes_total if self.bytes_total else 1.0
        done, total = self.bytes_done / 1e6, self.bytes_total / 1e6
        return f"version {self.version}: {done:.1f} of {total:.1f} MB ({share:.0%}), {self.bytes_s / 1e6:.1f} MB/s"


OnProgress = Callable[[Progress], None]
