"""Refusals that hold for everybody: idle keys of a large swarm hear little else, so such an answer is decided once.

`rules.leases` is asked about the best-placed key: active, without failures, leases or slots of the step. If even that key is
refused, so is every other one with the same versions and reliability, for the same reason (`tests/simulation/test_refusals.py`
holds the rule to that). It is repeated until a tally, a version or the pace changes, or a moment that the rules named.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shoal.config import TrainingConfig, TrustConfig
from shoal.coordinator.rules import leases


def best_placed(held_versions: Sequence[int], *, is_reliable: bool) -> leases.KeyView:
    """No key with these versions has more reasons to get work, but for one that was drawn for a late slot."""
    return leases.KeyView(
        is_active=True,
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
    answers: dict[tuple[tuple[int, ...], bool, int], leases.Refused | None] = field(default_factory=dict)

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
    ) -> leases.Refused | None:
        """What every such key hears; none if one of them may get work."""
        asked = (tuple(held_versions), is_reliable, keys_polling)
        if asked not in self.answers:
            swarm, key = replace(self.swarm, keys_polling=keys_polling), best_placed(asked[0], is_reliable=is_reliable)
            answer = leases.decide(swarm, key, training, trust)
            self.answers[asked] = answer if isinstance(answer, leases.Refused) else None
        return self.answers[asked]
