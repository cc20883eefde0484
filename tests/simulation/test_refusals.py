"""An answer that is repeated to idle keys is the one that the rules would give to each of them."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from shoal.config import TrainingConfig, TrustConfig
from shoal.coordinator.rules import batches, leases
from shoal.protocol.api import RunState
from shoal.simulation.memory.refusals import BEST, FULL, CommonView, Kind, Refusals, best_placed, wait_s

TRAINING = TrainingConfig(async_level=2, groups_per_step=8)
TRUST = TrustConfig(key_share=0.5, probation_share=0.25)
POLLING = 900
STATES: tuple[RunState, ...] = (*("running",) * 6, "paused", "drained", "finished")


def random_swarm(chance: random.Random) -> leases.SwarmView:
    step = chance.randrange(6)
    newest = chance.randrange(max(0, step - 3), step + 1)

    def few(most: int) -> int:
        return chance.randrange(most + 1)

    return leases.SwarmView(
        run_state=chance.choice(STATES),
        step=step,
        steps=chance.choice([5, 100, 100, 100]),
        has_space=chance.random() < 0.9,
        published=list(range(max(0, step - 2), newest + 1)),
        settled_version=chance.choice([None, None, *range(newest + 1)]),
        counts=batches.StepCounts(
            few(12), few(8), few(24), few(24), few(6), batches.Deferred(few(12), few(24), few(24))
        ),
        next_slot=few(20),
        tasks_per_slot=chance.choice([1, 2]),
        keys_polling=0,
        has_other_workers=False,
        has_other_active_workers=False,
        awaited_version=chance.choice([0, 0, step - 1, step]),
        useful_share=chance.choice([None, 0.3, 0.9]),
        has_time=chance.choice([False, True]),
    )


def random_key(chance: random.Random, *, is_reliable: bool, held: Sequence[int]) -> leases.KeyView:
    again = leases.OpenSlot(chance.randrange(4), chance.choice(held or [0]))
    return leases.KeyView(
        is_active=chance.random() < 0.5,
        held_versions=held,
        leases_held=chance.randrange(4),
        leases_allowed=chance.randrange(1, 5),
        slots_of_step=chance.randrange(6),
        open_slot=chance.choice([None, again]),
        is_reliable=is_reliable,
    )


def heard(refusals: Refusals, view: CommonView, kind: Kind, held: tuple[int, ...]) -> leases.Refused | None:
    """With the wait of a key that asks among others."""
    known = refusals.get(view, kind, held)
    return None if known is None else replace(known, retry_after_s=wait_s(known, POLLING))


def kinds() -> list[Kind]:
    flags = itertools.product([False, True], repeat=5)
    return [kind for kind in itertools.starmap(Kind, flags) if kind.has_other_workers >= kind.has_other_active_workers]


@pytest.mark.parametrize("seed", range(8))
def test_a_refusal_of_the_best_placed_key_is_that_of_every_key(seed: int) -> None:
    """One memory of answers for all swarms, so that it must tell swarms apart in which the rule answers differently."""
    chance, repeated, refusals = random.Random(seed), 0, Refusals(TRAINING, TRUST)
    for _ in range(400):
        swarm, held = random_swarm(chance), tuple(version for version in range(6) if chance.random() < 0.5)
        common, is_reliable = CommonView(swarm, 0, None, 1.0), chance.random() < 0.5
        known = heard(refusals, common, BEST[is_reliable], held)
        if known is None:
            continue
        repeated += 1
        for others, active in itertools.product([False, True], [False, True]):
            seen = swarm._replace(
                keys_polling=POLLING, has_other_workers=others or active, has_other_active_workers=active
            )
            key = random_key(chance, is_reliable=is_reliable, held=held)
            assert leases.decide(seen, key, TRAINING, TRUST) == known
    assert repeated > 100


@pytest.mark.parametrize("seed", range(8))
def test_a_refusal_of_a_kind_is_that_of_every_key_of_this_kind(seed: int) -> None:
    chance, repeated, refusals = random.Random(seed), 0, Refusals(TRAINING, TRUST)
    for _ in range(400):
        swarm, held = random_swarm(chance), tuple(version for version in range(6) if chance.random() < 0.5)
        common = CommonView(swarm, 0, None, 1.0)
        for kind in kinds():
            known = heard(refusals, common, kind, held)
            key = replace(
                random_key(chance, is_reliable=kind.is_reliable, held=held),
                is_active=kind.is_active,
                leases_held=chance.randrange(3, 6) if kind.is_full else 0,
                leases_allowed=chance.randrange(1, 4),
            )
            seen = swarm._replace(
                keys_polling=POLLING,
                has_other_workers=kind.has_other_workers,
                has_other_active_workers=kind.has_other_active_workers,
            )
            if known is not None:
                repeated += 1
                assert leases.decide(seen, key, TRAINING, TRUST) == known
            else:
                assert isinstance(leases.decide(seen, best_placed(held, kind), TRAINING, TRUST), leases.Grant)
    assert repeated > 1000


@pytest.mark.parametrize("seed", range(8))
def test_a_key_with_all_its_leases_hears_the_same_whatever_others_do(seed: int) -> None:
    chance, refusals = random.Random(seed), Refusals(TRAINING, TRUST)
    for _ in range(400):
        swarm, held = random_swarm(chance), tuple(version for version in range(6) if chance.random() < 0.5)
        is_reliable, (others, active) = chance.random() < 0.5, chance.choice([(0, 0), (1, 0), (1, 1)])
        known = heard(refusals, CommonView(swarm, 0, None, 1.0), FULL[is_reliable], held)
        seen = swarm._replace(
            keys_polling=POLLING, has_other_workers=bool(others), has_other_active_workers=bool(active)
        )
        key = replace(random_key(chance, is_reliable=is_reliable, held=held), leases_held=3, leases_allowed=3)
        assert known is not None
        assert leases.decide(seen, key, TRAINING, TRUST) == known


def test_no_refusal_is_repeated_while_one_key_could_get_work() -> None:
    chance, granted, refusals = random.Random(0), 0, Refusals(TRAINING, TRUST)
    for _ in range(400):
        swarm, everything = random_swarm(chance), tuple(range(6))
        answer = leases.decide(swarm, best_placed(everything, BEST[True]), TRAINING, TRUST)
        if isinstance(answer, leases.Grant):
            granted += 1
            assert refusals.get(CommonView(swarm, 0, None, 1.0), BEST[True], everything) is None
    assert granted > 20


def test_an_answer_outlasts_a_tally_that_changes_nothing_for_the_rule() -> None:
    """Two groups more are outstanding, enough are on their way before and after."""
    refusals, full = Refusals(TRAINING, TRUST), batches.StepCounts(8, 8, 40, 24, 0)
    swarm = random_swarm(random.Random(0))._replace(run_state="running", step=3, steps=100, has_space=True, counts=full)
    swarm = swarm._replace(published=[1, 2, 3], settled_version=None, awaited_version=0, useful_share=None)
    more = swarm._replace(counts=replace(full, outstanding_groups=42))
    before, after = CommonView(swarm, 0, None, 1.0), CommonView(more, 1, None, 1.0)
    first = refusals.get(before, BEST[True], (3,))
    assert first is not None
    assert refusals.get(after, BEST[True], (3,)) is first
    assert after.outlooks == before.outlooks
    hungry = swarm._replace(counts=batches.StepCounts(0, 0, 0, 0, 0))
    assert refusals.get(CommonView(hungry, 2, None, 1.0), BEST[True], (3,)) is None


def test_an_answer_ends_with_its_time_a_change_or_a_new_pace() -> None:
    pace = object()
    common = CommonView(random_swarm(random.Random(0)), 7, pace, 50.0)
    assert common.holds(7, pace, 49.9)
    assert not common.holds(7, pace, 50.0)
    assert not common.holds(8, pace, 0.0)
    assert not common.holds(7, object(), 0.0)
