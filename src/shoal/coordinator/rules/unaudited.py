"""What may enter a batch without an audit: pure rules over the settings, one coin per file, and the trainer's statistics.

Two limits hold together. One key brings at most `trust.unaudited_share` of a batch into it without an audit. And of the groups of
every file that carry a training signal at least the *useful rate* is audited, so that more forged groups than that share, of one
key or of several that belong together, rarely all escape.

Of a proposed batch, groups are held back that the trainer's policy finds improbable: the statistic of a group says how far its
log-probability lies from what the policy expects of its own samples, in standard deviations. No honest group of an admitted age
comes near the limit; docs/design/verification.md shows the fit. A group that was audited is what its seed selects, so it is never
held back. The check alone penalises no worker: an audit follows.
"""

import math
from collections.abc import Collection, Mapping

from shoal.config import TrainingConfig, TrustConfig

ESCAPE_CHANCE = 0.05
"""That forged groups beyond the share all pass the draws."""
MOST_ATTEMPTS = 3
"""Lists that are proposed for one step; the last one is recorded without the groups that it loses."""


def withheld(statistics: Mapping[str, float], audited: Collection[str], limit: float) -> set[str]:
    """Ids of the groups that go to an audit instead of into the batch."""
    return {
        group
        for group, value in statistics.items()
        if group not in audited and not (math.isfinite(value) and abs(value) <= limit)
    }


def limit_of_key(training: TrainingConfig, trust: TrustConfig) -> int:
    """How many groups of one key a batch may hold without an audit; at least one, so that slots of one group can be used."""
    return max(1, math.floor(trust.unaudited_share * training.groups_per_step))


def useful_rate(training: TrainingConfig, trust: TrustConfig) -> float:
    """Share of the useful groups of a file that is audited at least; 0 if everything may stay without an audit.

    A count alone would not do: who forges no more groups of a file than may stay without an audit meets nothing but the draw at
    the floor. Nor does anything show which keys belong together. So the rate counts forged groups, not keys.
    """
    limit = limit_of_key(training, trust)
    return 1.0 - ESCAPE_CHANCE ** (1.0 / (limit + 1)) if limit < training.groups_per_step else 0.0


def limit_of_file(rate: float, useful: int, coin: float) -> int:
    """How many of a file's useful groups may stay without an audit: the rest of the rate, rounded by a coin in [0, 1).

    A number, not each group by itself: of two forged groups both escape more rarely at the same audited tokens.
    """
    return math.floor((1.0 - rate) * useful + coin)


def limits_of_file(rate: float, groups: int, coin: float, left_of_key: int) -> list[int]:
    """The same by number of useful groups, and no more than its key has left."""
    return [min(limit_of_file(rate, useful, coin), left_of_key) for useful in range(groups + 1)]


def least_audited_share(keys: int, training: TrainingConfig, trust: TrustConfig) -> float:
    """Share of a batch that is audited when this many keys of equal speed are at the floor."""
    unaudited = keys * limit_of_key(training, trust) / training.groups_per_step
    return max(trust.audit_floor, useful_rate(training, trust), 1.0 - unaudited)


def cost_of_share(training: TrainingConfig, trust: TrustConfig) -> str:
    """What both limits cost, in one sentence."""
    limit, groups = limit_of_key(training, trust), training.groups_per_step
    least = max(trust.audit_floor, useful_rate(training, trust))
    enough = math.ceil((1.0 - least) * groups / limit)
    audited = [
        f"{keys}: {least_audited_share(keys, training, trust):.0%}" for keys in (1, 2, 4, 8, 16) if keys < enough
    ]
    few = (
        f" Least share of groups that are audited by number of keys at the floor: {', '.join(audited)},"
        if audited
        else ""
    )
    return (
        f"no key brings more than {limit} of {groups} groups into a batch without an audit.{few}"
        f"{' from' if few else ' From'} {enough} keys on {least:.0%}"
    )
