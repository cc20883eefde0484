"""How much of a batch may stay without an audit, and how rarely forged groups beyond that escape."""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import TrainingConfig, TrustConfig
from shoal.coordinator.rules.trust import groups_to_audit
from shoal.coordinator.rules.unaudited import (
    ESCAPE_CHANCE,
    cost_of_share,
    least_audited_share,
    limit_of_file,
    limit_of_key,
    limits_of_file,
    useful_rate,
    withheld,
)

TRUST = TrustConfig(unaudited_share=0.1, audit_floor=0.1)


def batches_of(groups: int) -> TrainingConfig:
    return TrainingConfig(groups_per_step=groups)


@pytest.mark.parametrize("groups", [1, 2, 8, 16, 32, 128, 256, 4096])
def test_forged_groups_beyond_the_share_escape_at_most_as_often_as_stated(groups: int) -> None:
    """However they are spread over files: each file's groups escape together no more often than one by one."""
    training = batches_of(groups)
    beyond, rate = limit_of_key(training, TRUST) + 1, useful_rate(training, TRUST)
    assert groups == 1 or (1.0 - rate) ** beyond <= ESCAPE_CHANCE + 1e-9
    assert rate <= useful_rate(batches_of(max(2, groups // 2)), TRUST), "a larger batch needs no higher rate"


def test_large_batches_and_a_share_of_one_leave_it_to_the_draw() -> None:
    assert useful_rate(batches_of(512), TRUST) < TRUST.audit_floor
    assert useful_rate(batches_of(32), TrustConfig(unaudited_share=1.0)) == 0.0


@given(st.floats(0.0, 1.0), st.integers(0, 16), st.floats(0.0, 1.0, exclude_max=True))
def test_a_file_keeps_the_rest_of_the_rate_up_to_one_group(rate: float, useful: int, coin: float) -> None:
    limit = limit_of_file(rate, useful, coin)
    assert 0 <= limit <= useful + (rate == 0.0)
    assert abs(limit - (1.0 - rate) * useful) <= 1.0
    assert limits_of_file(rate, 16, coin, 2)[useful] == min(2, limit)


@pytest.mark.parametrize("useful", range(1, 9))
def test_on_average_a_file_keeps_exactly_the_rest_of_the_rate(useful: int) -> None:
    coins = [(number + 0.5) / 1000 for number in range(1000)]
    kept = statistics.fmean(limit_of_file(0.527, useful, coin) for coin in coins)
    assert kept == pytest.approx(0.473 * useful, abs=0.01)


@pytest.mark.parametrize("useful", range(2, 9))
def test_two_forged_groups_of_a_file_escape_more_rarely_than_by_draws_of_their_own(useful: int) -> None:
    """Also if the forger decides how many groups of the file carry a signal."""
    rate, order = useful_rate(batches_of(32), TRUST), random.Random(useful)
    escaped, tries = 0, 4000
    for number in range(tries):
        limits = limits_of_file(rate, 8, (number + 0.5) / tries, 8)
        audited = groups_to_audit([], order.sample(range(8), 8), range(useful), limits)
        escaped += not {0, 1} & set(audited)
    assert escaped / tries <= (1.0 - rate) ** 2 + 0.01


def test_three_keys_that_forge_two_groups_each_rarely_bring_more_than_the_share_into_a_batch() -> None:
    """The old limit counted per key: three keys had three groups each, 0.28 of a batch of 32."""
    draw, rate, over, tries = random.Random("three keys"), useful_rate(batches_of(32), TRUST), 0, 4000
    for _ in range(tries):
        escaped = 0
        for _ in range(3):
            useful = 2 + sum(draw.random() < 0.55 for _ in range(6))
            audited = groups_to_audit(
                [], draw.sample(range(8), 8), range(useful), limits_of_file(rate, 8, draw.random(), 3)
            )
            escaped += 0 if {0, 1} & set(audited) else 2
        over += escaped > 0.1 * 32
    assert over / tries < 0.1


def test_what_the_limits_cost_a_small_swarm() -> None:
    costs = [round(least_audited_share(keys, batches_of(32), TRUST), 3) for keys in (1, 4, 8, 100)]
    assert costs == [0.906, 0.625, 0.527, 0.527]
    costs = [round(least_audited_share(keys, batches_of(512), TRUST), 3) for keys in (1, 4, 8, 100)]
    assert costs == [0.9, 0.602, 0.203, 0.1]


@given(st.integers(1, 5000), st.floats(0.001, 1.0))
def test_the_sentence_names_both_limits_whatever_the_settings(groups: int, share: float) -> None:
    training, trust = batches_of(groups), TrustConfig(unaudited_share=share)
    limit, said = limit_of_key(training, trust), cost_of_share(training, trust)
    assert said.startswith(f"no key brings more than {limit} of {groups} groups")
    least = max(trust.audit_floor, useful_rate(training, trust))
    assert said.endswith(f"keys on {least:.0%}")
    enough = math.ceil((1.0 - least) * groups / limit)
    assert all(f" {keys}: " in said for keys in itertools.takewhile(lambda keys: keys < enough, (1, 2, 4)))


@pytest.mark.parametrize(
    ("value", "held"),
    [(0.0, False), (30.0, False), (-30.0, False), (-30.1, True), (30.1, True), (float("nan"), True), (1e9, True)],
)
def test_a_statistic_beyond_the_limit_holds_a_group_back(value: float, held: bool) -> None:
    assert withheld({"group": value}, (), 30.0) == ({"group"} if held else set())


def test_audited_groups_are_never_held_back() -> None:
    assert withheld({"one": -99.0, "two": -99.0}, {"one"}, 30.0) == {"two"}
