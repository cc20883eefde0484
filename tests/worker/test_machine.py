import pytest

from shoal.policy.memory import memory_in_use
from shoal.worker.machine import Machine, is_worth_more_rows, machine_memory


def test_memory_is_known_and_this_process_uses_some_of_it() -> None:
    assert 0 < memory_in_use() < machine_memory()


def test_a_speed_that_stays_near_the_reported_one_is_not_reported_again() -> None:
    machine = Machine(100.0)
    assert not any(machine.update_speed(tokens, 1.0) for tokens in (90, 130, 70, 110, 180, 60))


@pytest.mark.parametrize("tokens_per_s", [10, 1000])
def test_a_speed_that_left_the_reported_one_is_reported_once_it_has_lasted(tokens_per_s: int) -> None:
    machine = Machine(100.0)
    slots = 0
    while not machine.update_speed(tokens_per_s, 1.0):
        slots += 1
        assert slots < 10
    assert abs(machine.tokens_per_s - tokens_per_s) < abs(100 - tokens_per_s)
    assert not machine.update_speed(round(machine.tokens_per_s), 1.0)


def test_the_line_leaves_out_what_was_not_measured() -> None:
    assert "relays" not in Machine(100.0).line()
    assert "memory" not in Machine(100.0).line()
    assert Machine(1234.0, 2e6, 8 << 30).line().startswith("1,234 tokens/s, ")


def test_a_link_without_limit_can_be_reported() -> None:
    assert Machine(100.0, 1e12).registration("worker", "torch/float32/cpu").link_bytes_per_s < 1e12


def test_more_samples_at_a_time_are_worth_it_while_they_are_much_faster_together() -> None:
    assert is_worth_more_rows(100.0, 300.0)
    assert not is_worth_more_rows(100.0, 120.0)
