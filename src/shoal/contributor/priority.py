"""How much of the machine a worker may take: which cores, and after whom. Applied once, before anything is loaded.

Children and threads that start later inherit both, the sandbox included.
"""

import os

from shoal.errors import ConfigError

LOWEST_PRIORITY = 19


def usable_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def chosen_cpus(count: int, usable: list[int]) -> list[int]:
    """The last of them: the first one usually serves the devices."""
    if count > len(usable):
        raise ConfigError(
            f"--cpus {count} is more than the {len(usable)} of this machine.", hint="Give a smaller number."
        )
    return usable[-count:]


def take_cpus(count: int) -> None:
    chosen = chosen_cpus(count, usable_cpus())
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, chosen)


def be_nice() -> None:
    """Other processes go first."""
    os.nice(LOWEST_PRIORITY - os.nice(0))
