"""Model-written programs per second: our sandbox against a bare subprocess that does not isolate anything.

    python benchmarks/sandbox.py [--programs 100] [--tests 1] [--rounds 5]

Every program reads a number and writes its square. `bare` starts `python -I -S` once per test, as a verifier without a sandbox
does; `sandbox` scores the same programs through the pool, filter, limits and comparison included. Sequential runs give the overhead
of one execution, parallel runs the throughput. `cold` starts each sandbox when it is needed, without the pool. Rounds
alternate; metrics are medians.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shoal.tasks.sandbox.pool import shared_pool
from shoal.tasks.sandbox.sandbox import Job, Sandbox, require_sandbox
from shoal.tasks.verifiers.programs import CodeTest, run_tests

PROGRAM = "x = int(input())\nprint(x * x)\n"


def bare(tests: list[CodeTest]) -> bool:
    command = [sys.executable, "-I", "-S", "-c", PROGRAM]
    return all(
        subprocess.run(command, input=test.input, capture_output=True, text=True, timeout=20, check=True).stdout
        == test.output
        for test in tests
    )


def cold(tests: list[CodeTest]) -> bool:
    with Sandbox() as sandbox:
        runs = list(sandbox.run(Job(PROGRAM, [test.input for test in tests])))
    return [run.produced.decode() for run in runs] == [test.output for test in tests]


def warm(tests: list[CodeTest]) -> bool:
    return run_tests(PROGRAM, tests).reward == 1.0


def seconds(score: Callable[[list[CodeTest]], bool], programs: int, tests: list[CodeTest], threads: int) -> float:
    """Per program."""
    started = time.perf_counter()
    if threads == 1:
        results = [score(tests) for _ in range(programs)]
    else:
        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(lambda _: score(tests), range(programs)))
    assert all(results)
    return (time.perf_counter() - started) / programs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--tests", type=int, default=1, help="tests per program")
    parser.add_argument("--rounds", type=int, default=5)
    settings = parser.parse_args()
    require_sandbox()
    tests = [
        CodeTest(kind="stdin_stdout", input=f"{number}\n", output=f"{number * number}\n")
        for number in range(settings.tests)
    ]
    seats = shared_pool().size
    measured: dict[str, list[float]] = {}
    for number in range(settings.rounds):
        for name, score, threads in (
            ("bare", bare, 1),
            ("cold", cold, 1),
            ("sandbox", warm, 1),
            ("bare_parallel", bare, seats),
            ("sandbox_parallel", warm, seats),
        ):
            measured.setdefault(name, []).append(seconds(score, settings.programs, tests, threads))
        print(f"round {number}:", {name: f"{1e3 * values[-1]:.1f} ms" for name, values in measured.items()}, flush=True)
    typical = {name: statistics.median(values) for name, values in measured.items()}
    print(
        json.dumps(
            {
                "sandbox_executions_per_s": round(1 / typical["sandbox_parallel"], 1),
                "bare_executions_per_s": round(1 / typical["bare_parallel"], 1),
                "overhead_ms": round(1e3 * (typical["sandbox"] - typical["bare"]), 2),
                "overhead_cold_ms": round(1e3 * (typical["cold"] - typical["bare"]), 2),
                "bare_ms": round(1e3 * typical["bare"], 2),
                "sandbox_ms": round(1e3 * typical["sandbox"], 2),
                "tests_per_program": settings.tests,
                "programs": settings.programs,
                "rounds": settings.rounds,
                "seats": seats,
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            }
        )
    )


if __name__ == "__main__":
    main()
