"""Refusals that hold for everybody: idle keys of a large swarm hear little else, so such an answer is decided once.

`rules.leases` is asked about the best-placed key: active, without failures, leases or slots of the step, and alone. If even that
key is refused, so is every other one with the same versions and reliability, for the same reason. If it is not, the same is asked
about the best-placed key among others that work, on probation or not (`tests/simulation/test_refusals.py` holds the rule to both).
An answer is repeated until a tally, a version or the pace changes, or a moment that the rules named.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shoal.config import TrainingConfig, TrustConfig
from shoal.coordinator.rules import leases


class Among(NamedTuple):
    """What the limits on shares of a step follow from."""

    is_active: bool
    has_other_workers: bool
    has_other_active_workers: bool


ALONE = Among(is_active=True, has_other_workers=False, has_other_active_workers=False)
"""No limit on shares holds for it."""


def best_placed(held_versions: Sequence[int], *, is_reliable: bool, is_active: bool = True) -> leases.KeyView:
    """No key with these versions has more reasons to get work, but for one that was drawn for a late slot."""
    return leases.KeyView(
        is_active=is_active,
        held_versions=held_versions,
        leases_held=0,
        leases_allowed=1,
        slots_of_step=0,
        is_reliable=is_reliable,
    )


@dataclass(slots=True)
class CommonView:
    """What all keys share between two changes, and what was answered meanwhile."""

    swarm: leases.SwarmView
    """Without other workers, and with nobody who asks."""
    revision: int
    observed: object
    until: float
    answers: dict[tuple[tuple[int, ...], bool, int, Among], leases.Refused | None] = field(default_factory=dict)

    def holds(self, revision: int, observed: object, now: float) -> bool:
        return revision == self.revision and observed is self.observed and now < self.until

    def refusal(
        self,
        held_versions: Sequence[int],
        keys_polling: int,
        training: TrainingConfig,
        trust: TrustConfig,
        *,
        is_reliable: bool,
        among: Among = ALONE,
    ) -> leases.Refused | None:
        """What every such key hears; none if one of them may get work."""
        asked = (tuple(held_versions), is_reliable, keys_polling, among)
        try:
            return self.answers[asked]
        except KeyError:
            swarm = replace(
                self.swarm,
                keys_polling=keys_polling,
                has_other_workers=among.has_other_workers,
                has_other_active_workers=among.has_other_active_workers,
            )
            key = best_placed(held_versions, is_reliable=is_reliable, is_active=among.is_active)
            answer = leases.decide(swarm, key, training, trust)
            found = self.answers[asked] = answer if isinstance(answer, leases.Refused) else None
            return found
