"""An answer that is repeated to idle keys is the one that the rules would give to each of them."""

import itertools
import random
from dataclasses import replace

import pytest

from shoal.config import TrainingConfig, TrustConfig
from shoal.coordinator.rules import batches, leases
from shoal.protocol.api import RunState
from shoal.simulation.memory.refusals import CommonView, best_placed

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
    )


def random_key(chance: random.Random, *, is_reliable: bool, held: list[int]) -> leases.KeyView:
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


@pytest.mark.parametrize("seed", range(8))
def test_a_refusal_of_the_best_placed_key_is_that_of_every_key(seed: int) -> None:
    chance, repeated = random.Random(seed), 0
    for _ in range(400):
        swarm, held = random_swarm(chance), [version for version in range(6) if chance.random() < 0.5]
        common, is_reliable = CommonView(swarm, 0, None, 1.0), chance.random() < 0.5
        known = common.refusal(held, POLLING, TRAINING, TRUST, is_reliable=is_reliable)
        if known is None:
            continue
        repeated += 1
        for others, active in itertools.product([False, True], [False, True]):
            seen = replace(
                swarm, keys_polling=POLLING, has_other_workers=others or active, has_other_active_workers=active
            )
            key = random_key(chance, is_reliable=is_reliable, held=held)
            assert leases.decide(seen, key, TRAINING, TRUST) == known
    assert repeated > 100


def test_no_refusal_is_repeated_while_one_key_could_get_work() -> None:
    chance, granted = random.Random(0), 0
    for _ in range(400):
        swarm = random_swarm(chance)
        answer = leases.decide(swarm, best_placed([0, 1, 2, 3, 4, 5], is_reliable=True), TRAINING, TRUST)
        if isinstance(answer, leases.Grant):
            granted += 1
            known = CommonView(swarm, 0, None, 1.0).refusal(range(6), 0, TRAINING, TRUST, is_reliable=True)
            assert known is None
    assert granted > 20


def test_an_answer_ends_with_its_time_a_change_or_a_new_pace() -> None:
    pace = object()
    common = CommonView(random_swarm(random.Random(0)), 7, pace, 50.0)
    assert common.holds(7, pace, 49.9)
    assert not common.holds(7, pace, 50.0)
    assert not common.holds(8, pace, 0.0)
    assert not common.holds(7, object(), 0.0)
