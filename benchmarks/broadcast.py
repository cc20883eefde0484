"""From the trainer's tensors to verified weights behind one relay: ours against shardcast 0.3.2.

    python benchmarks/broadcast.py [--megabytes 512] [--rounds 5] [--capped-mb-s 10] [--only PART]

Origin, relay and client are processes of their own, on loopback, with all files in memory, so that no disk is measured. The clock
runs from the call that publishes until the client holds the verified file. shardcast polls once per second, its minimum, and its
client asks for the list in a loop. Every version has new bytes; for deltas 0.6 % of the bf16 weights change, those nearest to zero
by many units and the others by one, and encoding and applying count. Capped: every link passes a proxy that shares one byte rate.
`swap_ms` is how long the embedded engine stands still while the new weights are copied in. Rounds alternate; results are ratios of
medians. `cpu_seconds` are those of all processes of a side per version, programs that they started included: they vary less than
seconds where other programs run, too.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import venv
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from shoal.broadcast.http.limits import TokenBucket

TENSORS = 32
CHANGED = 0.006
SHARDCAST = "shardcast==0.3.2"
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None

COMMON = """
import json, sys, time
from pathlib import Path
def say(**fields):
    print(json.dumps(fields), flush=True)
def commands():
    for line in sys.stdin:
        yield json.loads(line)
"""

OUR_ORIGIN = """
import numpy as np
from shoal.broadcast import Origin, OriginServer, OriginSettings, WireTensor
from shoal.identity import Keypair
root, port, deltas, parts = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "delta", int(sys.argv[4])
key = Keypair.generate()
settings = OriginSettings(keep_versions=1, grace_s=0, keyframe_every=1000, delta_from_bytes=0 if deltas else None)
origin = Origin(root, key, settings)
server = OriginServer(origin.store, "127.0.0.1", port)
server.start()
say(run_key=key.public)
for command in commands():
    data = memoryview(np.fromfile(command["path"], np.uint8))
    size = len(data) // parts
    tensors = [WireTensor(f"w{n}", "bfloat16", (size // 2,), data[n * size : (n + 1) * size]) for n in range(parts)]
    say(loaded=True)
    sys.stdin.readline()
    publication = origin.stage(command["version"], tensors)
    origin.announce(ledger_head="")
    say(kind=publication.kind)
"""

OUR_RELAY = """
from shoal.broadcast import Relay, RelaySettings
relay = Relay(RelaySettings(Path(sys.argv[1]), [sys.argv[3]], sys.argv[4], port=int(sys.argv[2]), grace_s=0))
relay.start()
say(url=relay.url)
sys.stdin.read()
"""

OUR_CLIENT = """
from shoal.broadcast import WeightClient, WeightClientSettings
client = WeightClient(sys.argv[3], lambda: [sys.argv[2]], Path(sys.argv[1]), WeightClientSettings(keep_versions=2))
say(ready=True)
counter = 0
for command in commands():
    while True:
        head = client.head(newer_than=counter, wait_s=20, deadline_s=300)
        counter = head.counter
        if head.newest is not None and head.newest.version >= command["version"]:
            break
    seen = time.monotonic()
    path = client.fetch_version(head.newest.version, head.newest.manifest_digest)
    say(path=str(path / "model.safetensors"), fetch_s=time.monotonic() - seen)
"""

THEIR_ORIGIN = """
import logging
from shardcast import OriginServer
root, port = Path(sys.argv[1]), int(sys.argv[2])
root.mkdir(parents=True)
(root / "data1.bin").write_bytes(bytes(1000))
logging.disable(logging.CRITICAL)
origin = OriginServer(str(root), port, 2)
say(ready=True)
for command in commands():
    say(loaded=True)
    sys.stdin.readline()
    say(version=origin.broadcast(command["path"]))
"""

THEIR_RELAY = """
import logging
from shardcast import MiddleNode
logging.disable(logging.CRITICAL)
root = Path(sys.argv[1])
root.mkdir(parents=True)
(root / "data1.bin").write_bytes(bytes(1000))
node = MiddleNode([sys.argv[3]], str(root), int(sys.argv[2]), check_interval=1)
say(ready=True)
sys.stdin.read()
"""

THEIR_CLIENT = """
import logging, os
from shardcast import ClientNode
logging.disable(logging.CRITICAL)
client = ClientNode([sys.argv[2]], sys.argv[1])
say(ready=True)
known = set()
for command in commands():
    while True:
        new = set(client.list_available_versions()) - known
        if new:
            break
        time.sleep(0.05)
    known |= new
    path = None
    while path is None:
        path = client.download_version(max(new, key=lambda name: int(name[1:])))
    say(path=path)
    os.unlink(path)
"""


class Node:
    """A child process that takes and answers one JSON line at a time."""

    def __init__(self, python: Path, script: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [str(python), "-c", COMMON + script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if "shardcast" in script else None,
            text=True,
        )
        self.hello = self.answer()

    def tell(self, **fields: object) -> None:
        self._stream(self._process.stdin).write(json.dumps(fields) + "\n")
        self._stream(self._process.stdin).flush()

    def answer(self) -> dict[str, Any]:
        for line in self._stream(self._process.stdout):
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError("a node of the benchmark died")

    def cpu_s(self) -> float:
        """Of the process and of those it started and waited for."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / CLOCK_TICKS

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)

    @staticmethod
    def _stream(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream


class Proxy:
    """A link: what comes back from the target is limited to one byte rate, all connections together."""

    def __init__(self, target_port: int, bytes_s: float) -> None:
        self._target_port = target_port
        self._bucket = TokenBucket(bytes_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        future = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self.port = int(future.result().sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            self._copy(reader, far_writer, limited=False), self._copy(far_reader, writer, limited=True)
        )

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, limited: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(32 << 10):
                if limited:
                    await asyncio.sleep(self._bucket.delay(len(data)))
                writer.write(data)
                await writer.drain()
        writer.close()


class Side:
    """Origin, relay and client of one system, and how long a version takes from the first to the last."""

    def __init__(self, origin: Node, relay: Node, client: Node) -> None:
        self._origin = origin
        self._nodes = (client, relay, origin)
        self._client = client

    def publish(self, version: int, path: Path) -> tuple[float, float]:
        """Seconds and CPU seconds until the client holds the version."""
        self._client.tell(version=version)
        self._origin.tell(version=version, path=str(path))
        self._origin.answer()
        started, cpu_s = time.monotonic(), self._cpu_s()
        self._origin.tell(go=True)
        self._client.answer()
        seconds = time.monotonic() - started
        self._origin.answer()
        return seconds, self._cpu_s() - cpu_s

    def _cpu_s(self) -> float:
        return sum(node.cpu_s() for node in self._nodes)

    def close(self) -> None:
        for node in self._nodes:
            node.close()


def our_side(work: Path, kind: str, link: float | None) -> Side:
    python = Path(sys.executable)
    port = free_port()
    origin = Node(python, OUR_ORIGIN, work / "origin", port, kind, TENSORS)
    run_key = origin.hello["run_key"]
    relay_port = free_port()
    upstream = f"http://127.0.0.1:{Proxy(port, link).port if link else port}"
    relay = Node(python, OUR_RELAY, work / "relay", relay_port, upstream, run_key)
    downstream = f"http://127.0.0.1:{Proxy(relay_port, link).port if link else relay_port}"
    return Side(origin, relay, Node(python, OUR_CLIENT, work / "client", downstream, run_key))


def their_side(work: Path, link: float | None) -> Side:
    python = shardcast_python()
    port, relay_port = free_port(), free_port()
    origin = Node(python, THEIR_ORIGIN, work / "origin", port)
    upstream = f"http://127.0.0.1:{Proxy(port, link).port if link else port}"
    relay = Node(python, THEIR_RELAY, work / "relay", relay_port, upstream)
    downstream = f"http://127.0.0.1:{Proxy(relay_port, link).port if link else relay_port}"
    return Side(origin, relay, Node(python, THEIR_CLIENT, work / "client", downstream))


def shardcast_python() -> Path:
    """Python of a venv with shardcast, made once in the cache directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shoal" / "bench" / "shardcast"
    python = cache / "bin" / "python"
    if not (cache / "ready").is_file():
        venv.create(cache, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", SHARDCAST], check=True)
        (cache / "ready").touch()
    return python


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Versions:
    """A file of bf16 weights that is replaced by fresh ones, or by ones that follow by a sparse update."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._rng = np.random.default_rng(0)
        self._count = size_bytes // 2 // TENSORS * TENSORS
        self._weights: NDArray[np.uint16] = np.zeros(0, np.uint16)

    def fresh(self) -> Path:
        """Other weights, with new bytes at every place."""
        if not len(self._weights):
            normal = self._rng.standard_normal(self._count, dtype=np.float32) * 0.03
            self._weights = (normal.view(np.uint32) >> 16).astype(np.uint16)
        self._weights = np.roll(self._weights, int(self._rng.integers(self._count)))
        return self._save()

    def update(self) -> Path:
        """Weights near zero move many units at once, as they do in training; of the others a few move by one."""
        near_zero = np.flatnonzero((self._weights & 0x7FFF) < 0x3800)
        others = self._rng.integers(0, self._count, int(CHANGED * self._count) - len(near_zero))
        self._weights[near_zero] ^= self._rng.integers(1, 128, len(near_zero), dtype=np.uint16)
        self._weights[others] += self._rng.choice(np.array([1, 0xFFFF], np.uint16), len(others))
        return self._save()

    def _save(self) -> Path:
        self._weights.tofile(self._path)
        return self._path


def compare(kind: str, size_bytes: int, rounds: int, link: float | None = None) -> dict[str, dict[str, float]]:
    """Median seconds and CPU seconds per version of `theirs` and of ours, which sends `full` weights or a `delta`."""
    times: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=MEMORY) as name, ExitStack() as stack:
        work = Path(name)
        versions = Versions(work / "weights.bin", size_bytes)
        sides = {"theirs": their_side(work / "theirs", link), kind: our_side(work / kind, kind, link)}
        for side in sides.values():
            stack.callback(side.close)
        # The base of the first delta; it also compiles the kernels that a running system has compiled long ago.
        sides[kind].publish(0, versions.fresh())
        sides[kind].publish(1, versions.update())
        for number in range(2, rounds + 2):
            path = versions.update() if kind == "delta" else versions.fresh()
            for name, side in sides.items():
                seconds, cpu_s = side.publish(number, path)
                times.setdefault(name, []).append((seconds, cpu_s))
                label = f"{name} {'capped ' if link else ''}{number}"
                print(f"{label}: {seconds:.2f} s, {cpu_s:.2f} CPU s", file=sys.stderr, flush=True)
    return {
        what: {name: round(statistics.median(pair[place] for pair in pairs), 2) for name, pairs in times.items()}
        for place, what in enumerate(("seconds", "cpu_seconds"))
    }


def swap_milliseconds(size_bytes: int) -> float:
    """How long the embedded engine takes to copy a verified version of this size into its live weights."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from shoal.policy import TorchEngine

    layers = max(1, round((size_bytes / 2 - 37_000 * 1024) / 12_840_000))
    config = LlamaConfig(
        vocab_size=37_000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        tie_word_embeddings=True,
    )
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        work = Path(name)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        config.save_pretrained(work)
        tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        save_file(tensors, work / "model.safetensors")
        engine = TorchEngine(work, eos_token_ids=(0,), dtype="bfloat16")
        times = []
        for _ in range(5):
            started = time.perf_counter()
            engine.load(work)
            times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--capped-mb-s", type=float, default=10)
    parser.add_argument("--capped-rounds", type=int, default=1)
    parser.add_argument("--only", choices=("full", "delta", "capped", "swap"), help="one part alone")
    options = parser.parse_args()
    if shutil.which("wget") is None:
        sys.exit("shardcast needs wget.")
    size_bytes = options.megabytes * 1_000_000
    results: dict[str, object] = {}
    parts = (options.only,) if options.only else ("full", "delta", "capped", "swap")
    for kind in ("full", "delta"):
        if kind in parts:
            medians = compare(kind, size_bytes, options.rounds)
            seconds, cpu_seconds = medians["seconds"], medians["cpu_seconds"]
            results[f"{kind}_speedup_vs_shardcast"] = round(seconds["theirs"] / seconds[kind], 2)
            results[f"seconds_{kind}"] = seconds
            results[f"{kind}_cpu_ratio"] = round(cpu_seconds["theirs"] / max(cpu_seconds[kind], 1e-6), 2)
            results[f"cpu_seconds_{kind}"] = cpu_seconds
    if "capped" in parts:
        seconds = compare("delta", size_bytes, options.capped_rounds, options.capped_mb_s * 1e6)["seconds"]
        results["delta_speedup_capped"] = round(seconds["theirs"] / seconds["delta"], 1)
        results["seconds_capped"] = seconds
    if "swap" in parts:
        results["swap_ms"] = round(swap_milliseconds(size_bytes), 1)
    results["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps(results))


if __name__ == "__main__":
    main()
