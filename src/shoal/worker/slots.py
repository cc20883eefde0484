"""One leased slot on its way through the engine: which of its samples wait, run and have ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.policy.engine import Completion
from shoal.protocol import api
from shoal.protocol.segments import sampled_count
from shoal.tasks.environments.episodes import Episode
from shoal.tasks.workload import WorkItem

Version = tuple[int, str]
"""Number and manifest digest of a policy version."""


def sampled_tokens(completion: Completion) -> int:
    return sampled_count(completion.segment_lengths) if completion.segment_lengths else len(completion.tokens)


@dataclass
class Slot:
    lease: api.Lease
    items: Sequence[WorkItem]
    weights: Path
    """The directory of the version that the lease names."""
    waiting: list[int]
    """Samples that have not entered the engine, by their place in `items`, in the order in which they will."""
    running: dict[int, int] = field(default_factory=dict)
    """Number of the engine's request → sample."""
    completions: dict[int, Completion] = field(default_factory=dict)
    episodes: dict[int, Episode] = field(default_factory=dict)
    """Of samples that have entered and meet an environment."""

    @property
    def version(self) -> Version:
        return self.lease.policy_version, self.lease.manifest_digest

    @property
    def is_begun(self) -> bool:
        return bool(self.running or self.completions)

    @property
    def is_complete(self) -> bool:
        return len(self.completions) == len(self.items)

    @property
    def tokens(self) -> int:
        """Sampled ones."""
        return sum(sampled_tokens(completion) for completion in self.completions.values())

    def __str__(self) -> str:
        return f"step {self.lease.step} slot {self.lease.slot}"

    def episode_counts(self) -> dict[str, float]:
        """As the event about a finished slot tells them."""
        episodes = self.episodes.values()
        return {
            "step": self.lease.step,
            "slot": self.lease.slot,
            "episodes": len(episodes),
            "turns": sum(episode.turns for episode in episodes),
            "failed": sum(bool(episode.failure) for episode in episodes),
            "environment_cpu_s": round(sum(episode.cost_s for episode in episodes), 4),
        }

    def enter(self, count: int) -> list[int]:
        """The samples that enter next."""
        entering, self.waiting = self.waiting[:count], self.waiting[count:]
        return entering

    def end(self, number: int, completion: Completion) -> None:
        self.completions[self.running.pop(number)] = completion
