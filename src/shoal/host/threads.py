"""How the compute threads of a machine are shared by the roles that one host runs."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import ConfigError

TRAINER = "trainer"
WORKERS = "workers"
ROLES = (TRAINER, "validator", "evaluator", WORKERS)
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Threads:
    """What an owner asks for; whatever is left open follows from the machine.

    The trainer has half of it, however many workers there are: a resumed step may give other weights with other threads.
    """

    each: int = 0
    """For every role; 0 shares the machine."""
    by_role: Mapping[str, int] = field(default_factory=dict)

    def of(self, role: str, others: int, cores: int) -> int:
        """Threads of a role of `ROLES` beside `others` processes that compute and are not the trainer."""
        if chosen := self.by_role.get(role, self.each):
            return chosen
        trainer = max(1, cores // 2)
        return trainer if role == TRAINER else max(1, (cores - trainer) // max(1, others))


def parse_threads(words: Sequence[str], each: int = 0) -> Threads:
    """`8` is for every role, `trainer=8` for one."""
    by_role: dict[str, int] = {}
    for word in words:
        role, equals, number = word.rpartition("=")
        if not number.isdecimal() or int(number) < 1 or (equals and role not in ROLES):
            raise ConfigError(
                f"--threads {word} is no number of threads.",
                hint=f"Such as 8 or trainer=8; roles are {', '.join(ROLES)}.",
            )
        if equals:
            by_role[role] = int(number)
        else:
            each = int(number)
    return Threads(each, by_role)


def usable_cores(quota_file: Path = CPU_QUOTA) -> int:
    """Cores that this process may use: those it is bound to, or fewer if its container has a quota."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text().split()
        return max(1, min(bound, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max" for no quota
        return bound
