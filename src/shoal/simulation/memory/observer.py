"""What is known of the keys that delivered lately: the pace of the swarm, and who is reliable. The store has `work.deliveries`.

It is found out again when something that it follows from has changed.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.config import ShoalConfig
from shoal.coordinator.rules import deliveries, trust
from shoal.coordinator.work.deliveries import OBSERVED_KEYS
from shoal.simulation.memory.presence import BeatingPresence
from shoal.simulation.memory.tables import Key, Tables


@dataclass(frozen=True, slots=True)
class Observed:
    keys: Sequence[Key]
    pace: deliveries.Pace
    is_enforced: bool
    limit: float
    """What a reliable key may miss; without limit as long as reliability does not count."""
    names: frozenset[str]
    """Of all keys that were looked at."""
    until: float
    """When one of them falls silent."""
    reliable: dict[str, list[str]] = field(default_factory=dict)
    """Keys that may fill a late slot, by numerics class, once somebody asked."""


class Observer:
    def __init__(
        self, tables: Tables, config: ShoalConfig, clock: Callable[[], float], presence: BeatingPresence
    ) -> None:
        self.tables, self.config, self.clock, self.presence = tables, config, clock, presence
        self.known: Observed | None = None

    def changed(self, key: Key) -> None:
        """Its record or trust is another one now."""
        is_usable = trust.is_usable(key.trust, self.config.trust)
        key.least_limit = deliveries.least_limit(key.record) if is_usable else math.nan
        key.longest_silence_s = deliveries.longest_silence_s(key.record, self.config.coordinator.lease_s)
        if self.known is not None and key.key in self.known.names:
            self.known = None

    def delivered(self, key: Key) -> None:
        """It has delivered last of all."""
        self.changed(key)
        self.tables.by_delivery.pop(key.key, None)
        self.tables.by_delivery[key.key] = key
        self.known = None

    def observe(self) -> Observed:
        known = self.known
        if known is None or self.clock() > known.until:
            known = self.known = self._observe()
        return known

    def _observe(self) -> Observed:
        longest_s = self.config.coordinator.lease_s
        looked = list(itertools.islice(reversed(self.tables.by_delivery.values()), OBSERVED_KEYS))
        names = frozenset([key.key for key in looked])
        has_left = not names.isdisjoint(self.presence.left)
        present = self.presence.present(looked) if has_left else looked
        newest_at, oldest_at = (present[0].delivered_at, present[-1].delivered_at) if present else (0.0, 0.0)
        current = present
        if not deliveries.are_all_current(newest_at - oldest_at, longest_s):
            current = [key for key in present if newest_at - key.delivered_at <= key.longest_silence_s]
        records = [key.record for key in current]
        pace = deliveries.pace(records, longest_s)
        until = self.presence.first_silent_at(present) if has_left else math.inf
        is_enforced = deliveries.is_enforced(records, pace)
        limit = pace.missed_limit if is_enforced else math.inf
        return Observed(current, pace, is_enforced, limit, names, until)

    def is_reliable(self, key: Key, observed: Observed) -> bool:
        return key.least_limit <= observed.limit

    def reliable_keys(self, observed: Observed, numerics_class: str) -> list[str]:
        known = observed.reliable.get(numerics_class)
        if known is None:
            same = [one for one in observed.keys if one.numerics_class == numerics_class]
            known = observed.reliable[numerics_class] = [one.key for one in same if self.is_reliable(one, observed)]
        return known
