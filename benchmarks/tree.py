"""Full weights from one origin to 12 relays that give shards to each other, against the bound of the links.

    python benchmarks/tree.py [--relays 12] [--megabytes 96] [--link-mb-s 6] [--rounds 3] [--plot docs/images/broadcast_tree.png]

Every node is a process of its own; the harness gives each one byte rate for all it sends and one for all it receives, the same
for everyone, in user space. The clock runs from the announcement until the last relay holds and has verified everything. With S
bytes, N receivers, uplinks u and downlinks d no scheme is faster than max(S/u_s, S/min d, N·S/(u_s + Σu)). In the second run one
relay is killed when half of the bound has passed; the clock stops when all others are complete.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread, Timer
from typing import Any

from shoal.broadcast import Origin, OriginServer, OriginSettings, ServerLimits, WireTensor
from shoal.identity import Keypair

SAMPLE_S = 0.1
RELAY = """
import json, sys, threading, time
from pathlib import Path
from shoal.broadcast import Relay, RelaySettings, ServerLimits
root, port, upstream, run_key, rate = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], float(sys.argv[5])
peers, total = json.loads(sys.argv[6]), int(sys.argv[7])
relay = Relay(RelaySettings(
    root, [upstream], run_key, port=port, peers=peers, max_download_bytes_s=rate, limits=ServerLimits(bytes_s_total=rate),
))
relay.start()
print(json.dumps({"ready": relay.url}), flush=True)
while True:
    time.sleep(float(sys.argv[8]))
    received = relay.metrics.counters["bytes_received"]
    done = received >= total and relay.complete and (root / "head.json").exists()
    print(json.dumps({"at": time.time(), "bytes": received, "done": done}), flush=True)
    if done:
        break
sys.stdin.read()
"""


@dataclass
class RelayNode:
    url: str
    process: subprocess.Popen[str]
    arrivals: list[tuple[float, float]] = field(default_factory=list)
    done_at: float | None = None

    def answer(self) -> dict[str, Any] | None:
        stdout = self.process.stdout
        assert stdout is not None
        line = stdout.readline()
        return json.loads(line) if line else None

    def follow(self) -> None:
        """Read samples until the relay is complete or gone."""
        while (sample := self.answer()) is not None:
            self.arrivals.append((sample["at"], sample["bytes"]))
            if sample["done"]:
                self.done_at = sample["at"]
                return


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def start_relays(work: Path, count: int, origin_url: str, run_key: str, rate: float, total: int) -> list[RelayNode]:
    ports = free_ports(count)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    nodes = []
    for number, (port, url) in enumerate(zip(ports, urls, strict=True)):
        arguments = [work / f"relay{number}", port, origin_url, run_key, rate, json.dumps(urls), total, SAMPLE_S]
        process = subprocess.Popen(
            [sys.executable, "-c", RELAY, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        nodes.append(RelayNode(url, process))
    for node in nodes:
        node.answer()
    return nodes


def distribute(
    count: int, size_bytes: int, shard_bytes: int, rate: float, *, kill_after_s: float | None
) -> list[RelayNode]:
    """Publish once and wait for everyone; times in the result are relative to the announcement."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        work = Path(name)
        key = Keypair.generate()
        origin = Origin(work / "origin", key, OriginSettings(shard_bytes=shard_bytes))
        origin.stage(0, [WireTensor("w", "bfloat16", (size_bytes // 2,), os.urandom(size_bytes))])
        server = OriginServer(origin.store, "127.0.0.1", 0, limits=ServerLimits(bytes_s_total=rate))
        server.start()
        nodes = start_relays(work, count, server.url, key.public, rate, size_bytes)
        try:
            followers = [Thread(target=node.follow) for node in nodes]
            origin.announce(ledger_head="")
            started = time.time()
            for follower in followers:
                follower.start()
            if kill_after_s is not None:
                Timer(kill_after_s, nodes[count // 2].process.kill).start()
            for follower in followers:
                follower.join()
        finally:
            for node in nodes:
                node.process.kill()
                node.process.wait()
            server.stop()
    for node in nodes:
        node.arrivals = [(at - started, received) for at, received in node.arrivals]
        node.done_at = node.done_at - started if node.done_at is not None else None
    return nodes


def draw(path: Path, runs: dict[str, list[RelayNode]], bound_s: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(runs), figsize=(11, 4), sharey=True)
    for axis, (title, nodes) in zip(axes, runs.items(), strict=True):
        for node in nodes:
            times = [at for at, _ in node.arrivals if at >= 0]
            verified = [received / 1e6 for at, received in node.arrivals if at >= 0]
            axis.plot(times, verified, linewidth=1)
            if node.done_at is None:
                axis.plot(times[-1], verified[-1], "kx", markersize=9, label="killed")
                axis.legend(loc="upper left")
        axis.axvline(bound_s, color="black", linestyle="--", linewidth=1)
        axis.set_title(title)
        axis.set_xlabel("seconds since the announcement (dashed: bound)")
    axes[0].set_ylabel("MB verified, one line per relay")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relays", type=int, default=12)
    parser.add_argument("--megabytes", type=int, default=96)
    parser.add_argument("--link-mb-s", type=float, default=6)
    parser.add_argument("--shard-kb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    size_bytes, rate = options.megabytes * 1_000_000, options.link_mb_s * 1e6
    bound_s = max(size_bytes / rate, options.relays * size_bytes / (rate * (options.relays + 1)))
    ratios: dict[str, list[float]] = {"time_over_bound": [], "time_over_bound_with_loss": []}
    last: dict[str, list[RelayNode]] = {}
    for _ in range(options.rounds):
        for name, kill_after_s in (("time_over_bound", None), ("time_over_bound_with_loss", bound_s / 2)):
            nodes = distribute(options.relays, size_bytes, options.shard_kb << 10, rate, kill_after_s=kill_after_s)
            finished = [node.done_at for node in nodes if node.done_at is not None]
            if len(finished) < options.relays - (kill_after_s is not None):
                sys.exit("Some relay never finished.")
            ratios[name].append(max(finished) / bound_s)
            last[f"{options.relays} relays{', one killed half-way' if kill_after_s else ''}"] = nodes
            print(f"{name}: last {max(finished):.2f} s, bound {bound_s:.2f} s", file=sys.stderr, flush=True)
    if options.plot is not None:
        draw(options.plot, last, bound_s)
    results = {name: round(statistics.median(values), 3) for name, values in ratios.items()}
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps({**results, "bound_s": round(bound_s, 2), "relays": options.relays, "machine": machine}))


if __name__ == "__main__":
    main()
