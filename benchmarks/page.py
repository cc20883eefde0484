"""What the live page costs the coordinator, and how fast it loads with a long history.

    python benchmarks/page.py [--rounds 5] [--pages 50] [--workers 100] [--turns 6] [--no-browser]

`cpu_ratio_50_pages`: processor time of the coordinator per signed request with 50 pages that receive its events over that with
none, in the same process, in turns, median of the rounds. The requests are those of `request_cost.py`. `load_s`: from the address
to all charts and the table of workers in Chromium on loopback, with 1,000 steps and 1,000 workers of history, median of the rounds.
"""

import argparse
import asyncio
import contextlib
import json
import math
import socket
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from shoal.coordinator.store import records
from shoal.coordinator.store.database import Transaction
from shoal.coordinator.store.rows import insert
from shoal.coordinator.store.tables import BatchRow, EvaluationRow, VersionRow
from shoal.identity import Keypair
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.rundir import RunDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import coordinator_load as load
from benchmarks.request_cost import HEARTBEATS, cpu_s, send_all, split

STEPS, WORKERS = 1000, 1000
CHROMIUM = "/usr/bin/chromium"
READ_BYTES = 1 << 16


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def open_pages(port: int, count: int) -> AsyncIterator[list[int]]:
    """Streams of events that are read as they come; yields the bytes that each received."""
    received = [0] * count

    async def read(index: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/events HTTP/1.1\r\nhost: coordinator\r\n\r\n")
        while data := await reader.read(READ_BYTES):
            received[index] += len(data)

    tasks = [asyncio.create_task(read(index)) for index in range(count)]
    while any(size == 0 for size in received):
        await asyncio.sleep(0.05)
    try:
        yield received
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def cost_us(pid: int, port: int, requests: list[bytes], pages: int) -> float:
    """Microseconds of the coordinator per request while this many pages are open."""
    async with open_pages(port, pages) as received:
        before = cpu_s(pid)
        accepted = await send_all(port, iter(requests))
        spent_s = cpu_s(pid) - before
    assert accepted == len(requests), f"{len(requests) - accepted} requests were refused"
    assert all(received), "a page received nothing"
    return 1e6 * spent_s / len(requests)


def measure_cost(rounds: int, pages: int, workers: int, turns: int) -> dict[str, list[float]]:
    costs: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as work:
        port, blocks = free_port(), 2 * rounds + 1
        directory = load.make_run(Path(work) / "run", "sqlite", port, blocks * turns * workers)
        keys = [Keypair.generate() for _ in range(workers)]
        load.register(directory, "sqlite", keys)
        requests = list(split(load.Requests(directory, port).stream(keys, blocks * turns, HEARTBEATS)))
        size = len(requests) // blocks
        with load.serving(directory, port) as process:
            trainer = CoordinatorClient.for_run(directory.descriptor(), directory.key("trainer"), "")
            digest = "0" * 64
            trainer.publish(api.VersionBody(version=0, manifest_digest=digest, weights_digest=digest, bytes_total=1))
            asyncio.run(send_all(port, iter(requests[:size])))  # warm
            for number in range(rounds):
                order = (("without", 0), ("with", pages)) if number % 2 else (("with", pages), ("without", 0))
                for place, (name, count) in enumerate(order):
                    start = (1 + 2 * number + place) * size
                    found = asyncio.run(cost_us(process.pid, port, requests[start : start + size], count))
                    costs[name].append(round(found, 1))
                print(json.dumps({name: found[-1] for name, found in costs.items()}), flush=True)
    return costs


def fill_history(directory: RunDirectory) -> None:
    def work(connection: Transaction) -> None:
        began = 1.0e9
        names = (
            *("reward_mean", "task_reward_mean", "output_length_mean", "entropy", "kl_behaviour", "truncation_rate"),
            *("clip_fraction_positive", "clip_fraction_negative", "grad_norm_mean", "age_mean", "repetition_rate"),
            *(
                "time_wait_batch_s",
                "time_update_s",
                "time_old_logprobs_s",
                "time_fetch_s",
                "time_stage_s",
                "reward_std",
            ),
        )
        for version in range(STEPS + 1):
            report = {name: 0.5 + 0.4 * math.sin(version / 50 + index) for index, name in enumerate(names)}
            text = json.dumps(report | {"samples": 256})
            insert(connection, VersionRow(version, f"{version:064x}", f"{version:064x}", 1000, began + version, text))
            if version < STEPS:
                insert(connection, BatchRow(version, began + version, 32, 40, "{}", json.dumps({"1": 20, "2": 12})))
            if version % 10 == 0:
                body = {
                    "version": version,
                    "accuracy": 0.5,
                    "problems": 200,
                    "samples": 1,
                    "mean_tokens": 9,
                    "seconds": 1,
                }
                insert(connection, EvaluationRow(version, began + version, json.dumps(body)))

    with records.open_store(directory) as store:
        store.write(work)


def measure_load(rounds: int) -> dict[str, list[float]]:
    from playwright.sync_api import sync_playwright

    times: dict[str, list[float]] = {"load_s": [], "workers_s": []}
    with tempfile.TemporaryDirectory() as work, sync_playwright() as playwright:
        port = free_port()
        directory = load.make_run(Path(work) / "run", "sqlite", port, STEPS)
        load.register(directory, "sqlite", [Keypair.generate() for _ in range(WORKERS)])
        fill_history(directory)
        with load.serving(directory, port):
            chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            for _ in range(rounds):
                context = chromium.new_context(viewport={"width": 1280, "height": 900})
                page = context.new_page()
                page.goto(f"http://127.0.0.1:{port}/")
                page.locator(".plot canvas").nth(8).wait_for()
                times["load_s"].append(round(page.evaluate("performance.now()") / 1000, 3))
                began = page.evaluate("performance.now()")
                page.evaluate("location.hash = '#/workers'")
                page.locator("tbody tr").nth(99).wait_for()
                times["workers_s"].append(round((page.evaluate("performance.now()") - began) / 1000, 3))
                print(json.dumps({name: found[-1] for name, found in times.items()}), flush=True)
                context.close()
            chromium.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pages", type=int, default=50)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--no-browser", action="store_true", help="only the cost per request")
    options = parser.parse_args()
    costs = measure_cost(options.rounds, options.pages, options.workers, options.turns)
    times = {} if options.no_browser else measure_load(options.rounds)
    medians = {name: statistics.median(found) for name, found in costs.items()}
    result = {
        "pages": options.pages,
        "rounds": options.rounds,
        "requests_per_round": options.workers * options.turns * (2 + HEARTBEATS),
        "cpu_us_per_request": medians["without"],
        "cpu_us_per_request_50_pages": medians["with"],
        "cpu_ratio_50_pages": round(medians["with"] / medians["without"], 3),
        "history_steps": STEPS,
        "history_workers": WORKERS,
        **{name: statistics.median(found) for name, found in times.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
