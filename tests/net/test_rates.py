import pytest

from shoal.net.rates import BURST_S, RateLimit
from support.swarm import Clock


def test_a_burst_passes_and_then_the_rate_holds() -> None:
    clock = Clock()
    limit = RateLimit(10.0, clock)
    burst = int(10 * BURST_S)
    assert [limit.wait_s("ann") for _ in range(burst)] == [0.0] * burst
    assert limit.wait_s("ann") == pytest.approx(0.1)
    clock.advance(0.1)
    assert limit.wait_s("ann") == 0.0
    assert limit.wait_s("ann") == pytest.approx(0.1)
    clock.advance(1000)
    assert [limit.wait_s("ann") for _ in range(burst)] == [0.0] * burst
    assert limit.wait_s("ann") > 0


def test_what_is_given_back_can_be_taken_again_and_fills_no_bucket_beyond_its_size() -> None:
    limit = RateLimit(1.0, Clock())
    while limit.wait_s("ann") == 0:
        pass
    limit.give_back("ann", 2)
    assert [limit.wait_s("ann") for _ in range(3)] == [0.0, 0.0, pytest.approx(1.0)]
    limit.give_back("ann", 1000)
    assert [limit.wait_s("ann") for _ in range(4)] == [0.0, 0.0, 0.0, pytest.approx(1.0)]
    limit.give_back("eve", 1000)
    assert [limit.wait_s("eve") for _ in range(4)] == [0.0, 0.0, 0.0, pytest.approx(1.0)]


def test_one_who_asks_too_often_does_not_slow_others() -> None:
    limit = RateLimit(1.0, Clock())
    while limit.wait_s("eve") == 0:
        pass
    assert limit.wait_s("ann") == 0.0


def test_asking_again_while_refused_costs_nothing() -> None:
    clock = Clock()
    limit = RateLimit(2.0, clock)
    while limit.wait_s("eve") == 0:
        pass
    assert len({limit.wait_s("eve") for _ in range(100)}) == 1
    clock.advance(0.5)
    assert limit.wait_s("eve") == 0.0


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    clock = Clock()
    limit = RateLimit(1.0, clock)
    while limit.wait_s("eve") == 0:
        pass
    clock.advance(-100)
    assert limit.wait_s("eve") > 0


def test_memory_is_bounded_and_the_longest_silent_is_forgotten_first() -> None:
    limit = RateLimit(1.0, Clock(), capacity=100)
    while limit.wait_s("eve") == 0:
        pass
    for number in range(99):
        limit.wait_s(f"other-{number}")
    assert limit.wait_s("eve") > 0
    for number in range(1000):
        limit.wait_s(f"more-{number}")
    assert len(limit._buckets) == 100


def test_a_rate_of_zero_limits_nobody() -> None:
    limit = RateLimit(0.0, Clock())
    assert {limit.wait_s("ann") for _ in range(1000)} == {0.0}


def test_an_expensive_request_takes_its_cost_and_passes_a_full_bucket_however_expensive() -> None:
    clock = Clock()
    limit = RateLimit(1.0, clock)
    assert limit.wait_s("ann", 2) == 0.0
    assert limit.wait_s("ann", 2) == pytest.approx(1.0)
    assert limit.wait_s("ann") == 0.0
    clock.advance(BURST_S)
    assert limit.wait_s("ann", 1_000_000) == 0.0
    assert limit.wait_s("ann") == pytest.approx(1.0)
