"""A laptop built out of files: battery, mains, terminals, seat; things that vanish while they are looked at."""

import os
import pty
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from shoal.contributor.conditions import Machine
from shoal.contributor.limits import Hours, Limits
from shoal.errors import ConfigError


def supply(root: Path, name: str, **facts: str) -> None:
    (root / name).mkdir(parents=True, exist_ok=True)
    for fact, value in facts.items():
        (root / name / fact).write_text(f"{value}\n")


@pytest.mark.parametrize(
    ("supplies", "on_battery"),
    [
        ({}, False),
        ({"AC": {"type": "Mains", "online": "1"}, "BAT0": {"type": "Battery", "status": "Charging"}}, False),
        ({"AC": {"type": "Mains", "online": "0"}, "BAT0": {"type": "Battery", "status": "Discharging"}}, True),
        ({"AC": {"type": "Mains", "online": "0"}, "BAT0": {"type": "Battery", "status": "Unknown"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Full"}}, False),
        ({"AC": {"type": "Mains", "online": "1"}}, False),
        ({"mouse": {"type": "Battery", "status": "Discharging", "scope": "Device"}}, False),
        ({"torn": {}}, False),
    ],
)
def test_the_battery_is_read_as_the_kernel_tells_it(
    supplies: dict[str, dict[str, str]], on_battery: bool, tmp_path: Path
) -> None:
    (tmp_path / "power").mkdir()
    for name, facts in supplies.items():
        supply(tmp_path / "power", name, **facts)
    assert Machine(power=tmp_path / "power").on_battery() is on_battery


def test_a_terminal_that_somebody_types_into_is_no_idle_machine(tmp_path: Path) -> None:
    (tmp_path / "pts").mkdir()
    _, terminal = pty.openpty()
    (tmp_path / "pts" / "0").symlink_to(os.ttyname(terminal))
    (tmp_path / "pts" / "1").write_text("a plain file is no terminal")
    touched = os.fstat(terminal).st_atime
    machine = Machine(devices=tmp_path, logind=lambda: "", clock=lambda: touched + 100)
    assert machine.idle_s() == pytest.approx(100)
    assert Machine(devices=tmp_path, logind=lambda: "", clock=lambda: touched - 50).idle_s() == 0.0


@pytest.mark.parametrize(
    ("said", "idle_s"),
    [
        ("IdleHint=no\nIdleSinceHint=0\n", 0.0),
        ("IdleHint=yes\nIdleSinceHint=400000000\n", 600.0),
        ("IdleHint=yes\nIdleSinceHint=soon\n", None),
        ("Unknown seat\n", None),
        ("", None),
    ],
)
def test_the_seat_says_when_it_was_last_used(said: str, idle_s: float | None, tmp_path: Path) -> None:
    assert Machine(devices=tmp_path, logind=lambda: said, clock=lambda: 1000.0).idle_s() == idle_s


def test_a_limit_that_this_system_cannot_keep_is_refused_with_another(tmp_path: Path) -> None:
    mute = Machine(power=tmp_path / "nothing", devices=tmp_path, logind=str)
    with pytest.raises(ConfigError, match=r"does not say when somebody uses it\. Use --hours"):
        mute.check(Limits(only_idle=True))
    with pytest.raises(ConfigError, match=r"does not say whether it is on battery\. Use --hours"):
        mute.check(Limits(not_on_battery=True))
    mute.check(Limits())


def test_only_what_a_limit_needs_is_asked(tmp_path: Path) -> None:
    def never() -> str:
        raise AssertionError("logind was asked")

    seen = Machine(logind=never, clock=lambda: time.mktime((2026, 11, 17, 22, 30, 0, 0, 0, -1))).look(Limits())
    assert (seen.minute_of_day, seen.idle_s, seen.on_battery) == (22 * 60 + 30, None, None)
    assert Machine().look(Limits(memory_bytes=1)).memory_bytes > 10**6
    assert Machine(process=tmp_path / "gone").memory_bytes() > 10**6


@pytest.fixture
def central_europe(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clocks go from 2 to 3 in spring and from 3 to 2 in autumn; the rule itself, so that no database of zones is needed."""
    with monkeypatch.context() as here:
        here.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        yield
    time.tzset()


def minutes_at_work(hours: str, first: datetime, last: datetime) -> int:
    """Minutes of the span at which a worker with these hours would work."""
    chosen, now, count = Hours.parse(hours), first, 0
    while now < last:
        seen = Machine(logind=str, clock=now.timestamp).look(Limits())
        count += chosen.contain(seen.minute_of_day)
        now += timedelta(minutes=1)
    return count


@pytest.mark.usefixtures("central_europe")
@pytest.mark.parametrize(
    ("hours", "day", "minutes"),
    [
        ("22-7", datetime(2026, 3, 28, 12, tzinfo=UTC), 8 * 60),  # the night of spring has no hour from 2 to 3
        ("22-7", datetime(2026, 10, 24, 12, tzinfo=UTC), 10 * 60),  # that of autumn has it twice
        ("22-7", datetime(2026, 11, 17, 12, tzinfo=UTC), 9 * 60),
        ("2-3", datetime(2026, 3, 28, 12, tzinfo=UTC), 0),
        ("2:30-3:30", datetime(2026, 3, 28, 12, tzinfo=UTC), 30),
        ("2-3", datetime(2026, 10, 24, 12, tzinfo=UTC), 120),
    ],
)
def test_hours_follow_the_clock_on_the_wall_when_it_is_put_forward_or_back(
    hours: str, day: datetime, minutes: int
) -> None:
    assert minutes_at_work(hours, day, day + timedelta(hours=22)) == minutes


def test_a_battery_that_vanishes_while_it_is_read_holds_nobody_up(tmp_path: Path) -> None:
    supply(tmp_path / "power", "BAT0", type="Battery", status="Discharging")
    machine = Machine(power=tmp_path / "power")
    assert machine.on_battery() is True
    for file in (tmp_path / "power" / "BAT0").iterdir():
        file.unlink()
    assert machine.look(Limits(not_on_battery=True)).on_battery is False
    (tmp_path / "power" / "BAT0").rmdir()
    (tmp_path / "power").rmdir()
    assert machine.look(Limits(not_on_battery=True)).on_battery is None
