"""The process behind verifiers that use large libraries: math-verify and reasoning-gym's scorers.

Requests and answers are lines of JSON, one at a time. Such libraries evaluate what a model wrote, so before the first
request this process loses the right to make processes and sockets, to run programs and to write files. The kernel limits its
memory and the processor time of each request; the process that started it watches the clock and kills it.
"""

import contextlib
import json
import logging
import math
import resource
import sys
from collections.abc import Callable
from typing import Any

from shoal.tasks.sandbox.runner import install_filter
from shoal.tasks.sandbox.seccomp import program_filter

MEMORY_BYTES = 2 << 30
CPU_LIMIT_S = 5


def main() -> None:
    logging.disable(logging.CRITICAL)
    warm_up(sys.argv[1])
    confine()
    print("ready", flush=True)
    for line in sys.stdin:
        limit_processor_time()
        print(json.dumps(answer(*json.loads(line))), flush=True)


def warm_up(kind: str) -> None:
    """Pays for imports before the first request is timed."""
    if kind == "math":
        equal("x^2+2x+1", "(x+1)^2")
    else:
        import reasoning_gym  # noqa: F401


def confine() -> None:
    for limit, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(limit, (most, most))
    install_filter(program_filter())


def limit_processor_time() -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + CPU_LIMIT_S, -1))


def answer(kind: str, *arguments: Any) -> float | None:
    """A reward; None if memory ran out. Whatever a library stumbles over is worth nothing."""
    try:
        reward = float(KINDS[kind](*arguments))
        return reward if math.isfinite(reward) else 0.0
    except (MemoryError, RecursionError):
        return None
    except Exception:
        return 0.0


def equal(expected: str, found: str) -> bool:
    from math_verify import verify

    return bool(verify(parsed(expected), parsed(found), timeout_seconds=None))


def parsed(text: str) -> list[object]:
    """As LaTeX, and as a plain expression where it has no commands."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    latex = parse(f"\\boxed{{{text}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)
    plain = [] if "\\" in text else parse(text, [ExprExtractionConfig()], parsing_timeout=None)
    return [*latex, *plain]


def gym_score(dataset: str, entry: dict[str, Any], found: str) -> float:
    from reasoning_gym import get_score_answer_fn

    with contextlib.redirect_stdout(sys.stderr):
        return float(get_score_answer_fn(dataset)(found, entry))


KINDS: dict[str, Callable[..., float]] = {"math": equal, "reasoning_gym": gym_score}


if __name__ == "__main__":
    main()
