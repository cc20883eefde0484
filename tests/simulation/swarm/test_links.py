"""How weights reach workers: bytes by the client's plan, time by the bound of the links."""

import pytest

from shoal.simulation.swarm.links import MESH_OVERHEAD, Broadcast, VersionPlans, fair_rates, finish_times
from shoal.simulation.swarm.spec import Weights, build_scenario
from simulation.swarm.small import spec, tree


def test_a_follower_takes_the_delta_and_a_newcomer_the_cheapest_way() -> None:
    plans = VersionPlans(Weights(full_bytes=1000.0, delta_bytes=10.0, keyframe_every=8))
    assert plans.fetch_bytes(0, None) == 1000
    assert plans.fetch_bytes(9, 8) == 10
    assert plans.fetch_bytes(9, 5) == 40
    assert plans.fetch_bytes(9, None) == 1010  # the keyframe of version 8 and a delta
    assert VersionPlans(Weights(full_bytes=1000.0)).fetch_bytes(9, 8) == 1000


def test_everybody_at_once_shares_what_the_relays_send() -> None:
    assert finish_times([10], [100.0], [[1.0]], [500.0]) == [pytest.approx(1 / 50)]
    assert finish_times([2], [100.0], [[1.0]], [500.0]) == [pytest.approx(1 / 100)]
    slow, fast = finish_times([5, 5], [10.0, 1000.0], [[1.0], [1.0]], [550.0])
    assert slow == pytest.approx(1 / 10)
    assert fast == pytest.approx(1 / 100)


def test_no_pool_sends_more_than_it_can_and_no_class_without_work_takes_part() -> None:
    rates = fair_rates([3, 7], [1e9, 1e9], [[0.5, 0.5], [1.0, 0.0]], [100.0, 1000.0], {0, 1})
    assert 3 * rates[0] * 0.5 + 7 * rates[1] <= 100.0 + 1e-6
    assert finish_times([0, 1], [1.0, 1.0], [[1.0], [1.0]], [10.0]) == [0.0, 1.0]


def test_nothing_is_complete_before_the_relays_have_it() -> None:
    built = tree(origin={"up_mbit_s": 8.0}, workers={"down_mbit_s": 10_000.0})
    built["relays"] = [{"count": 3, "up_mbit_s": 1e5}]
    broadcast = Broadcast(build_scenario(built))
    assert broadcast.s_per_byte[0] == pytest.approx(MESH_OVERHEAD / 1e6)
    assert Broadcast(spec(origin={"up_mbit_s": 8.0})).s_per_byte[0] == pytest.approx(6 / 1e6)


def test_workers_prefer_relays_of_their_region() -> None:
    built = tree(network={"between_regions_mbit_s": 1.0}, workers={"region": "north"})
    built["relays"] = [{"up_mbit_s": 100.0, "region": "north"}, {"up_mbit_s": 100.0, "region": "south"}]
    shares = Broadcast(build_scenario(built))._shares(build_scenario(built).workers[0], build_scenario(built))
    assert shares[0] > 0.95
