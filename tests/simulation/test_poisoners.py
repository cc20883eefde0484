"""Keys that earned the audit floor and then poison: little of it is trained on, whatever each file holds of it.

The careers of `benchmarks/poison.py`, with groups of one kind: those that the trainer's statistic finds, and those that only an
audit proves to be forged.
"""

import math
import statistics

import pytest

from benchmarks.poisoning.careers import STRATEGIES, careers

HONEST = (-2.0, -1.0, 0.0, 1.0, 2.0)
PLAUSIBLE = {"statistics": [0.0], "proven": [True]}
IMPROBABLE = {"statistics": [-100.0], "proven": [True]}
CAREERS = 8


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hostile", [1, 3])
def test_plausible_poison_is_found_by_audits_after_a_few_groups(hostile: int, strategy: str) -> None:
    """Of all hostile keys together, though nothing shows which keys belong together."""
    found = careers(PLAUSIBLE, HONEST, hostile, strategy, CAREERS)
    assert statistics.median(sum(career["consumed"]) for career in found) <= 8
    assert all(career["all_banned"] for career in found)
    shares = sorted(share for career in found for share in career["shares"])
    assert shares[math.ceil(0.95 * len(shares)) - 1] <= 0.1
    assert all(share <= 0.1 for career in found for share in career["key_shares"])


def test_improbable_poison_is_never_trained_on() -> None:
    for career in careers(IMPROBABLE, HONEST, 3, "one", CAREERS):
        assert career["all_banned"]
        assert sum(career["consumed"]) == 0
