"""When a worker rests: the contributor's limits and the state of the machine in, a reason to rest or none out. Pure.

A reason has a grace: slots that were begun may end within it, and what has not ended by then goes back, so that a slot is finished
or given back, whichever is sooner. A person who comes back to the machine waits least.
"""

import re
from dataclasses import dataclass

from shoal.errors import ConfigError

IDLE_AFTER_S = 300.0
"""A machine that nobody touched for so long is idle."""
PAUSE_GRACE_S = 15.0
BATTERY_GRACE_S = 15.0
USER_GRACE_S = 3.0
HOURS_GRACE_S = 60.0
DAY_MINUTES = 24 * 60
_TIME = r"(\d{1,2})(?::(\d{2}))?"


@dataclass(frozen=True)
class Hours:
    """From one minute of the day until another, by the machine's clock; may pass midnight."""

    begin: int
    end: int

    @classmethod
    def parse(cls, text: str) -> "Hours":
        """`22-7` or `22:30-6:45`."""
        found = re.fullmatch(rf"\s*{_TIME}\s*-\s*{_TIME}\s*", text)
        begin, end = (_minute(*found.group(1, 2)), _minute(*found.group(3, 4))) if found else (-1, -1)
        if min(begin, end) < 0 or begin == end:
            raise ConfigError(f"--hours {text} is no part of a day.", hint="Such as 22-7, or 22:30-6:45.")
        return cls(begin, end)

    def contain(self, minute: int) -> bool:
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end

    def __str__(self) -> str:
        return "-".join(f"{minute // 60}:{minute % 60:02}" for minute in (self.begin, self.end))


def _minute(hour: str, minute: str | None) -> int:
    """Minutes since midnight; 24 is the end of the day, -1 no time at all."""
    total = int(hour) * 60 + int(minute or 0)
    return total % DAY_MINUTES if int(minute or 0) < 60 and total <= DAY_MINUTES else -1


@dataclass(frozen=True)
class Limits:
    only_idle: bool = False
    not_on_battery: bool = False
    hours: Hours | None = None
    memory_bytes: int = 0
    """Most that the process may hold; 0 is no limit."""


@dataclass(frozen=True)
class Conditions:
    """What the machine says; None where it cannot."""

    minute_of_day: int = 0
    on_battery: bool | None = None
    idle_s: float | None = None
    memory_bytes: int = 0


@dataclass(frozen=True)
class Rest:
    reason: str
    grace_s: float


def reason_to_rest(limits: Limits, seen: Conditions, *, is_paused: bool) -> Rest | None:
    """The first that holds, the contributor's own wish before the others. Unknown conditions hold nobody up."""
    if is_paused:
        return Rest("paused by you; `shoal work resume` goes on", PAUSE_GRACE_S)
    if limits.not_on_battery and seen.on_battery:
        return Rest("this machine is on battery", BATTERY_GRACE_S)
    if limits.only_idle and seen.idle_s is not None and seen.idle_s < IDLE_AFTER_S:
        return Rest("somebody uses this machine", USER_GRACE_S)
    if limits.hours is not None and not limits.hours.contain(seen.minute_of_day):
        return Rest(f"it is outside {limits.hours}", HOURS_GRACE_S)
    return None


def memory_excess(limits: Limits, seen: Conditions) -> int:
    """Bytes above the limit."""
    return max(0, seen.memory_bytes - limits.memory_bytes) if limits.memory_bytes else 0
