"""Each limit with its condition: which reason to rest, with which grace, and which of several comes first."""

from typing import Any

import pytest

from shoal.contributor.limits import Conditions, Hours, Limits, memory_excess, reason_to_rest
from shoal.errors import ConfigError


def reason(limits: Limits, **seen: Any) -> str:
    rest = reason_to_rest(limits, Conditions(**seen), is_paused=False)
    return rest.reason if rest else ""


@pytest.mark.parametrize(
    ("limits", "seen", "words"),
    [
        (Limits(), {"on_battery": True, "idle_s": 0.0, "minute_of_day": 720}, ""),
        (Limits(not_on_battery=True), {"on_battery": True}, "on battery"),
        (Limits(not_on_battery=True), {"on_battery": False}, ""),
        (Limits(not_on_battery=True), {"on_battery": None}, ""),
        (Limits(only_idle=True), {"idle_s": 0.0}, "somebody uses this machine"),
        (Limits(only_idle=True), {"idle_s": 299.0}, "somebody uses this machine"),
        (Limits(only_idle=True), {"idle_s": 300.0}, ""),
        (Limits(only_idle=True), {"idle_s": None}, ""),
        (Limits(hours=Hours.parse("22-7")), {"minute_of_day": 12 * 60}, "it is outside 22:00-7:00"),
        (Limits(hours=Hours.parse("22-7")), {"minute_of_day": 23 * 60}, ""),
    ],
)
def test_a_limit_rests_the_worker_exactly_while_its_condition_holds(
    limits: Limits, seen: dict[str, Any], words: str
) -> None:
    found = reason(limits, **seen)
    assert words in found
    assert bool(found) == bool(words)


def test_the_contributors_own_wish_comes_first_and_a_person_waits_least() -> None:
    everything = Limits(only_idle=True, not_on_battery=True, hours=Hours.parse("22-7"))
    seen = Conditions(minute_of_day=720, on_battery=True, idle_s=0.0)
    paused = reason_to_rest(everything, seen, is_paused=True)
    on_battery = reason_to_rest(everything, seen, is_paused=False)
    used = reason_to_rest(everything, Conditions(720, False, 0.0), is_paused=False)
    late = reason_to_rest(everything, Conditions(720, False, 999.0), is_paused=False)
    assert paused is not None
    assert on_battery is not None
    assert used is not None
    assert late is not None
    assert "paused by you" in paused.reason
    assert used.grace_s < min(paused.grace_s, on_battery.grace_s) < late.grace_s


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("22-7", (22 * 60, 0, 6 * 60 + 59), (21 * 60 + 59, 7 * 60, 720)),
        ("9-17", (9 * 60, 16 * 60 + 59), (8 * 60 + 59, 17 * 60)),
        ("22:30 - 6:45", (22 * 60 + 30, 6 * 60 + 44), (22 * 60 + 29, 6 * 60 + 45)),
        ("18-24", (18 * 60, 24 * 60 - 1), (0, 17 * 60 + 59)),
        ("0-6", (0, 359), (360, 1439)),
    ],
)
def test_hours_may_pass_midnight(text: str, inside: tuple[int, ...], outside: tuple[int, ...]) -> None:
    hours = Hours.parse(text)
    assert all(hours.contain(minute) for minute in inside)
    assert not any(hours.contain(minute) for minute in outside)


@pytest.mark.parametrize("text", ["", "22", "7-7", "25-3", "22-7-8", "a-b", "-1-5", "22:60-7", "24:01-3", "９-１７x"])
def test_what_is_no_part_of_a_day_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no part of a day"):
        Hours.parse(text)


def test_memory_counts_only_above_the_limit() -> None:
    assert memory_excess(Limits(memory_bytes=10), Conditions(memory_bytes=12)) == 2
    assert memory_excess(Limits(memory_bytes=10), Conditions(memory_bytes=10)) == 0
    assert memory_excess(Limits(), Conditions(memory_bytes=10**12)) == 0
