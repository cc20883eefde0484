from typing import Any

import pytest

from shoal.config import TrustConfig
from shoal.coordinator.rules.leases import (
    StepLoad,
    leased_version,
    may_lease,
    wanted_version,
)

TRUST = TrustConfig(key_share=0.5, probation_share=0.25)
LOAD = StepLoad(
    slots_of_key=0,
    slots_of_probation=0,
    slots_planned=10,
    slots_outstanding=1,
    has_other_workers=True,
    has_other_active_workers=True,
)


def load(**changes: Any) -> StepLoad:
    return LOAD._replace(**changes)


@pytest.mark.parametrize(
    ("held", "expected"),
    [([5, 6, 7], 6), ([4, 5], 5), ([4], 4), ([3], None), ([7], None), ([], None), ([9, 2, 4], 4)],
)
def test_the_lease_names_the_newest_held_version_inside_the_window(held: list[int], expected: int | None) -> None:
    assert leased_version(held, [3, 4, 5, 6], step=6, async_level=2) == expected


def test_a_held_version_that_was_never_published_does_not_count() -> None:
    assert leased_version([6], [4, 5], step=6, async_level=2) is None


def test_the_wanted_version_is_the_newest_published_one() -> None:
    assert wanted_version([3, 4, 5], step=6, async_level=2) == 5
    assert wanted_version([3], step=6, async_level=2) is None
    assert wanted_version([6], step=6, async_level=0) == 6
    assert wanted_version([5], step=6, async_level=0) is None


def test_no_key_fills_more_than_its_share_beside_other_workers() -> None:
    assert may_lease(load(slots_of_key=4), False, TRUST)
    assert not may_lease(load(slots_of_key=5), False, TRUST)
    assert may_lease(load(slots_of_key=9, has_other_workers=False, has_other_active_workers=False), False, TRUST)


def test_all_keys_on_probation_together_fill_no_more_than_their_share_while_proven_ones_work() -> None:
    assert may_lease(load(slots_of_probation=2), True, TRUST)
    assert not may_lease(load(slots_of_probation=3), True, TRUST)
    assert may_lease(load(slots_of_probation=3), False, TRUST)
    assert may_lease(load(slots_of_probation=9, has_other_active_workers=False), True, TRUST)


def test_shares_never_keep_a_step_waiting_on_which_nobody_works() -> None:
    assert may_lease(load(slots_of_key=9, slots_of_probation=9, slots_outstanding=0), True, TRUST)


def test_a_small_step_leaves_everybody_one_slot() -> None:
    assert may_lease(load(slots_planned=1), True, TRUST)
    assert may_lease(load(slots_planned=0), True, TRUST)
