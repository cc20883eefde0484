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
