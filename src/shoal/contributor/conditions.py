"""What this machine says about itself: time of day, battery, when somebody last touched it, memory of this process.

Linux answers from files, and from logind where there is one; where a question cannot be answered the answer is None. Roots are
parameters, so that a test can build a laptop out of files.
"""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from shoal.contributor.limits import Conditions, Limits
from shoal.errors import ConfigError

LOGIND_DEADLINE_S = 2.0
TERMINALS = ("pts/[0-9]*", "tty[0-9]*")


def ask_logind() -> str:
    """What logind says of the first seat; empty where there is none."""
    command = ["loginctl", "show-seat", "seat0", "--property=IdleHint", "--property=IdleSinceHint"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=LOGIND_DEADLINE_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


@dataclass(frozen=True)
class Machine:
    power: Path = Path("/sys/class/power_supply")
    devices: Path = Path("/dev")
    process: Path = Path("/proc/self/statm")
    logind: Callable[[], str] = ask_logind
    clock: Callable[[], float] = time.time

    def look(self, limits: Limits) -> Conditions:
        """Asks only what the limits need."""
        now = datetime.fromtimestamp(self.clock())
        return Conditions(
            minute_of_day=now.hour * 60 + now.minute,
            on_battery=self.on_battery() if limits.not_on_battery else None,
            idle_s=self.idle_s() if limits.only_idle else None,
            memory_bytes=self.memory_bytes() if limits.memory_bytes else 0,
        )

    def check(self, limits: Limits) -> None:
        """Refuses a limit that this system can never keep."""
        if limits.only_idle and self.idle_s() is None:
            raise ConfigError("This system does not say when somebody uses it.", hint="Use --hours instead.")
        if limits.not_on_battery and not self.power.is_dir():
            raise ConfigError("This system does not say whether it is on battery.", hint="Use --hours instead.")

    def on_battery(self) -> bool | None:
        """Mains decide where there are any; else a battery of the machine that is being discharged. None: no supply is known."""
        supplies = [_facts(folder) for folder in sorted(self.power.glob("*"))] if self.power.is_dir() else []
        own = [facts for facts in supplies if facts.get("scope") != "Device"]  # a mouse has a battery too
        mains = [facts.get("online") for facts in own if facts.get("type") in ("Mains", "USB") and "online" in facts]
        batteries = [facts.get("status") for facts in own if facts.get("type") == "Battery"]
        if not batteries:
            return False if mains or self.power.is_dir() else None
        if "1" in mains:
            return False
        return "Discharging" in batteries or bool(mains)

    def idle_s(self) -> float | None:
        """Since the last key, click or byte typed into a terminal; None where neither logind nor terminals are there."""
        last = [*self._touched(), *self._seat()]
        return max(0.0, self.clock() - max(last)) if last else None

    def memory_bytes(self) -> int:
        try:
            return int(self.process.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            return _peak_bytes()

    def _touched(self) -> Iterator[float]:
        """Reading from a terminal, which is what typing ends in, sets its time of access."""
        for pattern in TERMINALS:
            for path in self.devices.glob(pattern):
                try:
                    facts = path.stat()
                except OSError:
                    continue
                if stat.S_ISCHR(facts.st_mode):
                    yield facts.st_atime

    def _seat(self) -> Iterator[float]:
        facts = dict(line.partition("=")[::2] for line in self.logind().splitlines())
        if facts.get("IdleHint") == "no":
            yield self.clock()
        elif facts.get("IdleHint") == "yes" and facts.get("IdleSinceHint", "").isdigit():
            yield int(facts["IdleSinceHint"]) / 1e6


def _facts(folder: Path) -> dict[str, str]:
    """A supply may vanish while it is looked at."""
    found = {}
    for name in ("type", "online", "status", "scope"):
        try:
            found[name] = (folder / name).read_text().strip()
        except OSError:
            continue
    return found


def _peak_bytes() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
