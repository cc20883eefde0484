"""What all actors of a simulated swarm share: clock, coordinator, work, links, and what is counted.

A request waits until the coordinator has answered those before it; heartbeats take their share of its time.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.config import ShoalConfig
from shoal.simulation.clock import EventClock
from shoal.simulation.operations import Operations
from shoal.simulation.swarm.links import Broadcast
from shoal.simulation.swarm.spec import SwarmSpec
from shoal.simulation.swarm.work import Workload

if TYPE_CHECKING:
    from shoal.simulation.swarm.members import Member

LEAST_SHARE = 0.02
"""Of the coordinator's time that is left for requests when heartbeats take all of it."""


Sums = defaultdict[Any, float]


def _sums() -> Sums:
    return defaultdict(float)


@dataclass
class Counted:
    """Sums over a time; those of the warm-up are subtracted."""

    tokens: Sums = field(default_factory=_sums)
    """Generated, and of these delivered late, lost with a worker, or accepted (with and without a signal)."""
    bytes: Sums = field(default_factory=_sums)
    idle_s: Sums = field(default_factory=_sums)
    """Of engines with nothing in them, by class and reason."""
    busy_s: Sums = field(default_factory=_sums)
    """Rows that sample, in engines, by class."""
    present_s: Sums = field(default_factory=_sums)
    files: Sums = field(default_factory=_sums)
    audited_groups: float = 0.0
    checked_groups: float = 0.0
    validating_s: float = 0.0
    file_wait_s: float = 0.0
    """Until a validator took a file."""
    requests: float = 0.0
    heartbeats: float = 0.0
    trainer_wait_s: float = 0.0
    publish_wait_s: float = 0.0

    def copy(self) -> "Counted":
        parts: dict[str, Any] = {
            name: value.copy() if isinstance(value, defaultdict) else value for name, value in vars(self).items()
        }
        return Counted(**parts)

    def __sub__(self, before: "Counted") -> "Counted":
        parts: dict[str, Any] = {}
        for name, value in vars(self).items():
            earlier = getattr(before, name)
            if isinstance(value, defaultdict):
                parts[name] = _sums()
                parts[name].update({key: number - earlier.get(key, 0.0) for key, number in value.items()})
            else:
                parts[name] = value - earlier
        return Counted(**parts)


@dataclass
class World:
    spec: SwarmSpec
    config: ShoalConfig
    clock: EventClock
    coordinator: Operations
    workload: Workload
    broadcast: Broadcast
    counted: Counted = field(default_factory=Counted)
    keys: dict[str, None] = field(default_factory=dict)
    """Keys that send heartbeats, in the order of joining."""
    published_at: list[float] = field(default_factory=list)
    opened_at: dict[int, float] = field(default_factory=dict)
    """First lease of each step, ..."""
    filed_at: dict[int, float] = field(default_factory=dict)
    """... first file, ..."""
    formed_at: list[float] = field(default_factory=list)
    """... and batch."""
    received_at: dict[str, float] = field(default_factory=dict)
    """Files that no validator took yet, by lease."""
    junk: set[str] = field(default_factory=set)
    """Leases whose files do not hold."""
    forged: dict[str, set[int]] = field(default_factory=dict)
    """Leases whose files have forged groups."""
    banned_after_s: dict[str, float] = field(default_factory=dict)
    """By key, from its first lease on."""
    on_file: Callable[[], None] = lambda: None
    """A file has arrived."""
    on_verdict: Callable[[], None] = lambda: None
    park: Callable[["Member", float], None] = lambda member, at: member.ask_at(at)
    """Takes a worker that asks again at this time (`swarm.idle`); without a place for idle ones it is an event of its own."""
    slowest_answer_s: float = 0.0
    service_s: float = field(init=False)
    """What the coordinator takes for a request; 0: nothing."""
    _heartbeat_share: float = field(init=False)
    """Of its time, for the heartbeats of one key."""
    _free_at: float = 0.0

    def __post_init__(self) -> None:
        rate = self.spec.coordinator.requests_per_s
        self.service_s = 1.0 / rate if rate else 0.0
        self._heartbeat_share = self.service_s / self.config.coordinator.heartbeat_s

    def request(self, act: Callable[[], None]) -> None:
        """Asks the coordinator; what it does happens when it gets to it."""
        if self.service_s:
            self.clock.at(self.answered_at(), act)
        else:
            self.counted.requests += 1
            act()

    def answered_at(self) -> float:
        """When a request of now is answered, which keeps the next ones waiting."""
        self.counted.requests += 1
        share, now = 1.0 - len(self.keys) * self._heartbeat_share, self.clock.now
        begins_at = self._free_at if self._free_at > now else now
        self._free_at = begins_at + self.service_s / (share if share > LEAST_SHARE else LEAST_SHARE)
        wait_s = self._free_at - now
        if wait_s > self.slowest_answer_s:
            self.slowest_answer_s = wait_s
        return self._free_at

    def beat(self) -> None:
        self.counted.heartbeats += len(self.keys)
        self.coordinator.beat(self.keys)
        self.clock.after(self.config.coordinator.heartbeat_s, self.beat)
