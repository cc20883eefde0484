import random
from collections import deque
from collections.abc import Callable
from functools import partial

import pytest

from shoal.simulation import EventClock
from shoal.simulation.clock import Event


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


class Line:
    """A crowd of events in the order of time, one at a time."""

    def __init__(self, clock: EventClock) -> None:
        self.clock, self.turns = clock, deque[Event]()

    def after(self, seconds: float, event: Callable[[], object]) -> None:
        at = self.clock.now + seconds
        if self.turns and self.turns[-1][0] > at:
            self.clock.at(at, event)
        else:
            self.turns.append((at, self.clock.number(), event))

    def play(self, first: Event | None, end: float, most: float) -> int:
        if not self.turns or self.turns[0][0] > end or (first is not None and first < self.turns[0]):
            return 0
        self.clock.now, _, event = self.turns.popleft()
        event()
        return 1


@pytest.mark.parametrize("seed", range(20))
def test_a_crowd_gives_the_order_of_one_heap(seed: int) -> None:
    """A server with a queue, asked from events at random times, is the same with one heap."""
    clock, line = EventClock(start=0.0), EventClock(start=0.0)
    line.crowd = crowd = Line(line)
    assert _served(seed, line, crowd.after) == _served(seed, clock, clock.after)


Plan = Callable[[float, Callable[[], object]], None]


def _served(seed: int, clock: EventClock, plan: Plan) -> list[object]:
    chance, heard = random.Random(seed), list[object]()
    free_at = 0.0

    def ask(name: int) -> None:
        nonlocal free_at
        heard.append(("asks", name, clock()))
        free_at = max(clock(), free_at) + chance.choice([0.0, 0.001, 0.5])
        clock.after(free_at - clock(), lambda: hear(name))

    def hear(name: int) -> None:
        heard.append(("hears", name, clock()))
        plan(chance.choice([0.0, 0.25, 0.3, chance.random()]), lambda: ask(name))

    for name in range(5):
        clock.after(chance.random(), partial(ask, name))
    limit = 40
    counts = [clock.run(lambda: len(heard) >= limit, 7.0, 150)]
    limit = 10_000
    counts += [clock.run(lambda: len(heard) >= limit, 7.0, 150) for _ in range(3)]
    return [*heard, counts, clock.now]
