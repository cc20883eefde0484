"""Processor time of the coordinator per signed request, in this tree and at another revision, measured in turns.

    python benchmarks/request_cost.py [--against 653ecf5] [--rounds 5] [--workers 100] [--turns 4]

Each tree serves a real run directory on one core with its own code. Its own `benchmarks/coordinator_load.py` makes the run and
signs the requests: per worker and turn a lease, four heartbeats, the submission of that lease with its upload, four heartbeats.
They come over 16 connections; the first turn warms up. `ratio` compares the medians of the rounds. Packages that only the other
revision needs (fastapi, before the table of routes) are installed beside its files, in the versions of its constraints.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONNECTIONS = 16
HEARTBEATS = 8
"""Per lease."""


def cpu_s(pid: int) -> float:
    """Processor time of all threads of a process: its CPU clock, whose number Linux makes from the process id."""
    return time.clock_gettime((~pid << 3) | 2)


def split(stream: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(stream):
        size_bytes = int(stream[position : position + 8])
        yield stream[position + 8 : position + 8 + size_bytes]
        position += 8 + size_bytes


async def send_all(port: int, requests: Iterator[bytes]) -> int:
    """Sends the requests in order, as fast as they are answered; returns how many were answered with 200."""

    async def send_some() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        accepted = 0
        for request in requests:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
            accepted += head.startswith(b"HTTP/1.1 200")
        writer.close()
        return accepted

    return sum(await asyncio.gather(*(send_some() for _ in range(CONNECTIONS))))


def measure(workers: int, turns: int) -> float:
    """Microseconds per request, of the tree whose modules are on the path."""
    from benchmarks import coordinator_load as load
    from shoal.identity import Keypair
    from shoal.protocol import api
    from shoal.protocol.client import CoordinatorClient

    with tempfile.TemporaryDirectory() as work, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        probe.close()
        directory = load.make_run(Path(work) / "run", "sqlite", port, (turns + 1) * workers)
        keys = [Keypair.generate() for _ in range(workers)]
        load.register(directory, "sqlite", keys)
        requests = list(split(load.Requests(directory, port).stream(keys, turns + 1, HEARTBEATS)))
        warm_up = workers * (2 + HEARTBEATS)
        with load.serving(directory, port) as process:
            trainer = CoordinatorClient.for_run(directory.descriptor(), directory.key("trainer"), "")
            digest = "0" * 64
            trainer.publish(api.VersionBody(version=0, manifest_digest=digest, weights_digest=digest, bytes_total=1))
            accepted = asyncio.run(send_all(port, iter(requests[:warm_up])))
            before = cpu_s(process.pid)
            accepted += asyncio.run(send_all(port, iter(requests[warm_up:])))
            spent_s = cpu_s(process.pid) - before
        assert accepted == len(requests), f"{len(requests) - accepted} requests were refused"
        return 1e6 * spent_s / (len(requests) - warm_up)


def measure_tree(tree: Path, workers: int, turns: int) -> float:
    environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}:{tree}:{tree / 'packages'}"}
    command = [sys.executable, "-P", __file__, "--here", "--workers", str(workers), "--turns", str(turns)]
    done = subprocess.run(command, env=environment, cwd=tree, check=True, stdout=subprocess.PIPE, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """The files of a revision, in a temporary directory."""
    with tempfile.TemporaryDirectory() as work:
        tree = Path(work) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            if "fastapi" in (tree / "pyproject.toml").read_text():
                install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tree / "packages")]
                subprocess.run([*install, "--constraint", str(tree / "constraints.txt"), "fastapi"], check=True)
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="653ecf5", help="revision to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.workers, options.turns)))
        return
    costs: dict[str, list[float]] = {"here": [], "against": []}
    with checked_out(options.against) as tree:
        trees = [("against", tree), ("here", ROOT)]
        for number in range(options.rounds):
            for name, place in trees if number % 2 else reversed(trees):
                costs[name].append(round(measure_tree(place, options.workers, options.turns), 1))
            print(json.dumps({name: found[-1] for name, found in costs.items()}), flush=True)
    medians = {name: statistics.median(found) for name, found in costs.items()}
    result = {
        "against": options.against,
        "rounds": options.rounds,
        "requests": options.workers * options.turns * (2 + HEARTBEATS),
        "cpu_us_per_request": medians["here"],
        "cpu_us_per_request_against": medians["against"],
        "ratio": round(medians["here"] / medians["against"], 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
