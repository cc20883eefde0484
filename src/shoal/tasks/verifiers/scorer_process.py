"""The process that runs reasoning-gym's scorers.

Requests and answers are lines of JSON, one at a time. Some scorers evaluate what a model wrote, so before the first request this
process loses the right to make processes and sockets, to run programs, to signal others and to change files. The kernel limits
its memory and the processor time of each request; the process that started it watches the clock and kills it.
"""

import contextlib
import json
import logging
import math
import resource
import sys
import time
from typing import Any

from shoal.tasks.sandbox.runner import install_filter
from shoal.tasks.sandbox.seccomp import reader_filter

MEMORY_BYTES = 2 << 30
CPU_LIMIT_S = 5


def main() -> None:
    logging.disable(logging.CRITICAL)
    import reasoning_gym  # noqa: F401  pays for the import before the first request is timed

    confine()
    print("ready", flush=True)
    for line in sys.stdin:
        limit_processor_time()
        started = time.process_time()
        reward = answer(*json.loads(line))
        print(json.dumps([reward, time.process_time() - started]), flush=True)


def confine() -> None:
    for limit, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(limit, (most, most))
    install_filter(reader_filter())


def limit_processor_time() -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + CPU_LIMIT_S, -1))


def answer(dataset: str, entry: dict[str, Any], found: str) -> float | None:
    """A reward; None if memory ran out. An answer that a scorer cannot read is worth nothing."""
    try:
        reward = score(dataset, entry, found)
        return reward if math.isfinite(reward) else 0.0
    except (MemoryError, RecursionError):
        return None
    except Exception:
        return 0.0


def score(dataset: str, entry: dict[str, Any], found: str) -> float:
    from reasoning_gym import get_score_answer_fn

    with contextlib.redirect_stdout(sys.stderr):
        return float(get_score_answer_fn(dataset)(found, entry))


if __name__ == "__main__":
    main()
