"""What one worker process has done since it started."""

from dataclasses import dataclass


@dataclass
class WorkerTotals:
    submissions: int = 0
    tokens: int = 0
    swaps: int = 0
    drain_s: float = 0.0
    swap_s: float = 0.0

    def swapped(self, drain_s: float, swap_s: float) -> None:
        self.swaps += 1
        self.drain_s += drain_s
        self.swap_s += swap_s

    def swap_line(self) -> str:
        mean_ms = 1000 / max(self.swaps, 1)
        swaps = "1 weight swap" if self.swaps == 1 else f"{self.swaps} weight swaps"
        return (
            f"{swaps}: on average the last running sample ended {self.drain_s * mean_ms:.0f} ms after the new weights were ready, "
            f"and the swap took {self.swap_s * mean_ms:.0f} ms"
        )
