import random
from collections.abc import Callable
from functools import partial

import pytest

from shoal.simulation import EventClock


def test_time_jumps_from_event_to_event_in_the_order_of_planning() -> None:
    clock, heard = EventClock(start=10.0), list[tuple[float, str]]()
    clock.after(2.0, lambda: heard.append((clock(), "late")))
    clock.after(1.0, lambda: heard.append((clock(), "first")))
    clock.after(1.0, lambda: heard.append((clock(), "second")))
    clock.after(-5.0, lambda: heard.append((clock(), "at once")))
    clock.run(lambda: False, longest_s=100.0)
    assert heard == [(10.0, "at once"), (11.0, "first"), (11.0, "second"), (12.0, "late")]


def test_it_ends_when_it_is_over_or_the_time_is_up() -> None:
    clock, heard = EventClock(start=0.0), list[float]()

    def tick() -> None:
        heard.append(clock())
        clock.after(1.0, tick)

    tick()
    clock.run(lambda: len(heard) == 3, longest_s=100.0)
    assert heard == [0.0, 1.0, 2.0]
    clock.run(lambda: False, longest_s=2.0)
    assert heard[-1] == 4.0


@pytest.mark.parametrize("seed", range(20))
def test_a_line_of_answers_gives_the_order_of_one_heap(seed: int) -> None:
    """A server with a queue, asked from events at random times, is the same with one heap."""
    assert _served(seed, EventClock.finally_after, EventClock.in_line) == _served(
        seed, EventClock.after, EventClock.after
    )


Plan = Callable[[EventClock, float, Callable[[], object]], None]


def _served(seed: int, plan: Plan, again: Plan) -> list[object]:
    clock, chance, heard = EventClock(start=0.0), random.Random(seed), list[object]()
    free_at = 0.0

    def ask(name: int) -> None:
        nonlocal free_at
        heard.append(("asks", name, clock()))
        free_at = max(clock(), free_at) + chance.choice([0.0, 0.001, 0.5])
        early_s = chance.choice([0.0, 0.0, 0.0, 0.3])  # now and then an answer comes before those in front of it
        plan(clock, free_at - clock() - early_s, lambda: hear(name))

    def hear(name: int) -> None:
        heard.append(("hears", name, clock()))
        again(clock, chance.choice([0.0, 0.25, 0.3, chance.random()]), lambda: ask(name))

    for name in range(5):
        clock.after(chance.random(), partial(ask, name))
    limit = 40
    counts = [clock.run(lambda: len(heard) >= limit, 7.0, 150)]
    limit = 10_000
    counts += [clock.run(lambda: len(heard) >= limit, 7.0, 150) for _ in range(3)]
    return [*heard, counts, clock.now]
