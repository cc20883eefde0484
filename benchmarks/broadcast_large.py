"""A 7B model from disk to disk through origin, relay and client, in full and as a delta, with a cold page cache.

    python benchmarks/broadcast_large.py [--dir DIR] [--source DIR] [--hidden 4096] [--layers 32] [--memory-mb 1024] [--deltas 3]

Shapes are those of Llama 2 7B: 13.5 GB in bf16; a smaller width or fewer layers give a smaller model. Before each phase all
files are written out and dropped from the page cache. A phase is one process at work while the others wait, except that shards
pass through the network. `delta_over_read_and_hash` is the client's fetch of a delta divided by reading and hashing the model
once, past the page cache like the delta or through it, whichever is faster; it is the median over all deltas, and `ratios` has
each in order. A client writes its second delta, and every one after it, over the file of the version before the last; the first
one needs a new file, which takes longer. `delta_over_read_and_write` is the fetch of the last delta divided by copying the file
to a new one. `bytes_written_over_model` is what all three processes together write for a delta, as the kernel counts it. A
process whose anonymous memory passes the limit ends the benchmark with an error. The disk that it needs is stated before it
starts. The weights that the origin publishes are a mapped file in `--source`, which may be in memory, where a trainer has them.
`unchanged_blocks` is the share of blocks of 4 KiB without a changed weight: what a file system with reflinks could share
between two versions.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

VOCABULARY = 32_000
CHANGED = 0.006
CHUNK_NUMBERS = 8 << 20
DISK_COPIES = 4.1
"""The shards of origin and relay, two versions of the client, and deltas. The source is one more until it is staged."""
BLOCK_NUMBERS = 2048
"""In 4 KiB, the unit in which file systems share bytes."""
LOOK_EVERY_S = 0.05
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

COMMON = """
import json, sys, time
from pathlib import Path
def say(**fields):
    print(json.dumps(fields), flush=True)
def commands():
    for line in sys.stdin:
        yield json.loads(line)
"""

ORIGIN = """
import gc
import numpy as np
from shoal.broadcast import Origin, OriginServer, OriginSettings, WireTensor
from shoal.identity import Keypair
root, source, shapes = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
key = Keypair.generate()
origin = Origin(root, key, OriginSettings(keep_versions=4, delta_from_bytes=0))
server = OriginServer(origin.store, "127.0.0.1", 0)
server.start()
say(run_key=key.public, url=server.url)
def tensors():
    data, at = memoryview(np.memmap(source, np.uint8, "r")), 0
    for name, shape in shapes:
        size = 2 * shape[0] * shape[1]
        yield WireTensor(name, "bfloat16", tuple(shape), data[at : at + size])
        at += size
for command in commands():
    publication = origin.stage(command["version"], tensors())
    origin.announce(ledger_head="")
    say(kind=publication.kind, follow_bytes=publication.follow_bytes, digest=publication.manifest_digest)
"""

RELAY = """
from shoal.broadcast import Relay, RelaySettings
relay = Relay(RelaySettings(Path(sys.argv[1]), [sys.argv[2]], sys.argv[3]))
relay.start()
say(url=relay.url)
head = Path(sys.argv[1]) / "head.json"
for command in commands():
    # Its head is replaced after the shards of the new version were queued.
    while not head.exists() or command["digest"] not in head.read_text() or not relay.complete:
        time.sleep(0.02)
    say(complete=True)
"""

CLIENT = """
import os, queue, shutil
from concurrent.futures import ThreadPoolExecutor
from shoal.broadcast import WeightClient, WeightClientSettings, applying
from shoal.broadcast.applying import DISK_THREADS, BlockFile, aligned_buffer
from shoal.broadcast.manifest import open_manifest
from shoal.broadcast.staging import check_weights
client = WeightClient(sys.argv[3], lambda: [sys.argv[2]], Path(sys.argv[1]), WeightClientSettings(keep_versions=1))
def copy(path, block_bytes=32 << 20):
    # All old bytes are read, as many are written.
    shutil.rmtree(path.parents[2] / "staging" / "spare", ignore_errors=True)
    target = path.with_name("copy")
    with open(path, "rb") as old, open(target, "w+b") as new:
        size = os.fstat(old.fileno()).st_size
        os.posix_fallocate(new.fileno(), 0, size)
        files = [BlockFile(one, file.fileno(), direct=True) for one, file in ((path, old), (target, new))]
        buffers = queue.SimpleQueue()
        for _ in range(DISK_THREADS):
            buffers.put(aligned_buffer(block_bytes).data)
        def move(at):
            buffer = buffers.get()
            part = buffer[: size - at]
            files[0].read(part, at)
            files[1].write(part, at)
            buffers.put(buffer)
        with ThreadPoolExecutor(DISK_THREADS) as pool:
            list(pool.map(move, range(0, size, block_bytes)))
        for file in files:
            file.close()
    return target
say(ready=True)
if sys.argv[5] == "direct":
    applying.LARGE_SHARE = 0.0
usual_share = applying.LARGE_SHARE
for command in commands():
    if "check" in command:
        manifest = open_manifest((Path(sys.argv[4]) / "manifests" / command["digest"]).read_bytes(), sys.argv[3])
        applying.LARGE_SHARE = 0.0 if command["direct"] else float("inf")
        check_weights(Path(command["check"]), manifest)
        applying.LARGE_SHARE = usual_share
        say(right=True)
    elif "copy" in command:
        copied = copy(Path(command["copy"]))
        say(copied=True)
        copied.unlink()
    else:
        path = client.fetch_version(command["version"], command["digest"])
        say(path=str(path / "model.safetensors"))
"""


class Node:
    """A child process that takes and answers one JSON line at a time, and what the kernel knows about it."""

    def __init__(self, name: str, script: str, *arguments: object) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMON + script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.peak_bytes = self.peak_mapped_bytes = 0
        self.hello = self._answer()

    def ask(self, **fields: object) -> dict[str, Any]:
        stdin = _stream(self._process.stdin)
        stdin.write(json.dumps(fields) + "\n")
        stdin.flush()
        return self._answer()

    def cpu_s(self) -> float:
        fields = self._read("stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS

    def written_bytes(self) -> int:
        return int(self._field("io", "write_bytes"))

    def look(self) -> int:
        """Anonymous memory now, in bytes."""
        try:
            anonymous, mapped = (1024 * int(self._field("status", name).split()[0]) for name in ("RssAnon", "RssFile"))
        except (FileNotFoundError, ProcessLookupError, StopIteration):
            return 0
        self.peak_bytes, self.peak_mapped_bytes = max(self.peak_bytes, anonymous), max(self.peak_mapped_bytes, mapped)
        return anonymous

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        line = _stream(self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"the {self.name} died")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _read(self, name: str) -> str:
        return Path(f"/proc/{self._process.pid}/{name}").read_text()

    def _field(self, name: str, field: str) -> str:
        lines = self._read(name).splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{field}:"))


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


class MemoryLimit:
    """Looks at all nodes often and kills them when one passes the limit."""

    def __init__(self, nodes: list[Node], limit_bytes: int) -> None:
        self._nodes, self._limit_bytes = nodes, limit_bytes
        self._done = threading.Event()
        self.broken_by = ""
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(LOOK_EVERY_S):
            for node in self._nodes:
                if node.look() > self._limit_bytes:
                    self.broken_by = node.name
                    for other in self._nodes:
                        other.close()
                    return


class Phases:
    """Seconds and CPU seconds of each phase, and the bytes that each process wrote in it."""

    def __init__(self, nodes: list[Node], *directories: Path) -> None:
        self._nodes, self._directories = nodes, directories
        self.seconds: dict[str, dict[str, float]] = {}
        self.written: dict[str, int] = {}

    def run(self, phase: str, node: Node, **command: object) -> dict[str, Any]:
        drop_page_cache(*self._directories)
        before = [(other.cpu_s(), other.written_bytes()) for other in self._nodes]
        started = time.monotonic()
        answer = node.ask(**command)
        wall_s = time.monotonic() - started
        # What is still only in the page cache was counted when it was written there.
        after = [(other.cpu_s(), other.written_bytes()) for other in self._nodes]
        cpu = {
            f"cpu_{other.name}": round(now[0] - then[0], 2)
            for other, then, now in zip(self._nodes, before, after, strict=True)
        }
        self.seconds[phase] = {"seconds": round(wall_s, 2), **cpu}
        self.written[phase] = sum(now[1] - then[1] for then, now in zip(before, after, strict=True))
        print(f"{phase}: {self.seconds[phase]}", file=sys.stderr, flush=True)
        return answer


def drop_page_cache(*directories: Path) -> None:
    os.sync()
    for directory in directories:
        for path in filter(Path.is_file, directory.rglob("*")):
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def shapes_of(hidden: int, layers: int) -> list[tuple[str, tuple[int, int]]]:
    inner = hidden * 11_008 // 4096
    shapes = [("model.embed_tokens.weight", (VOCABULARY, hidden))]
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes += [(f"{prefix}.self_attn.{name}_proj.weight", (hidden, hidden)) for name in "qkvo"]
        shapes += [(f"{prefix}.mlp.{name}_proj.weight", (inner, hidden)) for name in ("gate", "up")]
        shapes += [(f"{prefix}.mlp.down_proj.weight", (hidden, inner))]
        shapes += [(f"{prefix}.{name}.weight", (1, hidden)) for name in ("input_layernorm", "post_attention_layernorm")]
    return [*shapes, ("model.norm.weight", (1, hidden)), ("lm_head.weight", (VOCABULARY, hidden))]


def chunks(count: int) -> Iterator[int]:
    for start in range(0, count, CHUNK_NUMBERS):
        yield min(CHUNK_NUMBERS, count - start)


def write_weights(path: Path, count: int, rng: np.random.Generator) -> None:
    """Every chunk is the same numbers from another place on: no two shards are equal."""
    normal = rng.standard_normal(CHUNK_NUMBERS, dtype=np.float32) * 0.03
    numbers = (normal.view(np.uint32) >> 16).astype(np.uint16)
    with open(path, "wb") as file:
        for size in chunks(count):
            file.write(np.roll(numbers, int(rng.integers(CHUNK_NUMBERS)))[:size].data)


def update_weights(path: Path, count: int, rng: np.random.Generator) -> float:
    """Weights near zero move many units at once, as they do in training; of the others a few move by one.

    Returns the share of blocks in which none did.
    """
    unchanged = 0
    with open(path, "r+b") as file:
        for size in chunks(count):
            at = file.tell()
            old = np.frombuffer(file.read(2 * size), np.uint16)
            weights = old.copy()
            near_zero = np.flatnonzero((weights & 0x7FFF) < 0x3800)
            others = rng.integers(0, size, max(0, int(CHANGED * size) - len(near_zero)))
            weights[near_zero] ^= rng.integers(1, 128, len(near_zero), dtype=np.uint16)
            weights[others] += rng.choice(np.array([1, 0xFFFF], np.uint16), len(others))
            whole = size - size % BLOCK_NUMBERS
            unchanged += int((old == weights)[:whole].reshape(-1, BLOCK_NUMBERS).all(axis=1).sum())
            file.seek(at)
            file.write(weights.data)
    return unchanged * BLOCK_NUMBERS / count


def measure(
    work: Path, source: Path, hidden: int, layers: int, memory_bytes: int, deltas: int, direct: bool
) -> dict[str, object]:
    shapes = shapes_of(hidden, layers)
    count = sum(rows * columns for _, (rows, columns) in shapes)
    rng = np.random.default_rng(0)
    write_weights(source, count, rng)
    with ExitStack() as stack:
        origin = Node("origin", ORIGIN, work / "origin", source, json.dumps(shapes))
        stack.callback(origin.close)
        run_key = origin.hello["run_key"]
        relay = Node("relay", RELAY, work / "relay", origin.hello["url"], run_key)
        stack.callback(relay.close)
        path = "direct" if direct else "usual"
        client = Node("client", CLIENT, work / "client", relay.hello["url"], run_key, work / "origin", path)
        stack.callback(client.close)
        nodes = [origin, relay, client]
        limit = MemoryLimit(nodes, memory_bytes)
        stack.callback(limit.stop)
        phases = Phases(nodes, work, source.parent)
        written, ratios, sizes, unchanged = [], [], [], []
        try:
            for version in range(deltas + 1):
                kind = "delta" if version else "full"
                if version:
                    unchanged.append(update_weights(source, count, rng))
                before = sum(node.written_bytes() for node in nodes)
                published = phases.run(f"{kind} stage", origin, version=version)
                if published["kind"] != kind:
                    sys.exit(f"Version {version} was published as {published['kind']}.")
                digest = published["digest"]
                if version == deltas:
                    os.truncate(source, 0)  # the last version is staged: nobody reads it any more
                phases.run(f"{kind} relay", relay, digest=digest)
                path = phases.run(f"{kind} fetch", client, version=version, digest=digest)["path"]
                if version:
                    # Also what the relay wrote between two phases.
                    written.append((sum(node.written_bytes() for node in nodes) - before) / (2 * count))
                    # The reference is the faster of both ways to read.
                    phases.run("read and hash", client, check=path, digest=digest, direct=True)
                    phases.run("read and hash, page cache", client, check=path, digest=digest, direct=False)
                    took = {phase: max(row["seconds"], 1e-6) for phase, row in phases.seconds.items()}
                    fetch_s = took["delta fetch"]
                    ratios.append(fetch_s / min(took["read and hash"], took["read and hash, page cache"]))
                    print(f"delta {version}: {ratios[-1]:.2f} of reading and hashing", file=sys.stderr, flush=True)
                    sizes.append(published["follow_bytes"])
            # Once, because there is no disk for a copy beside a file that the next version is written over.
            phases.run("read and write", client, copy=path)
            bound = fetch_s / max(phases.seconds["read and write"]["seconds"], 1e-6)
        except (RuntimeError, FileNotFoundError):
            if not limit.broken_by:
                raise
            sys.exit(f"The anonymous memory of the {limit.broken_by} passed {memory_bytes / 1e6:.0f} MB.")
        return {
            "delta_over_read_and_hash": round(statistics.median(ratios), 2),
            "ratios": [round(ratio, 2) for ratio in ratios],
            "delta_over_read_and_write": round(bound, 2),
            "bytes_written_over_model": round(statistics.median(written), 3),
            "model_gb": round(2 * count / 1e9, 2),
            "delta_mb": round(statistics.median(sizes) / 1e6, 1),
            "phases": phases.seconds,
            "written_mb": {phase: round(size / 1e6, 1) for phase, size in phases.written.items()},
            "unchanged_blocks": round(statistics.median(unchanged), 6),
            "peak_anonymous_mb": {node.name: round(node.peak_bytes / 1e6) for node in nodes},
            # The origin maps the source; nobody else maps a weight.
            "peak_mapped_mb": {node.name: round(node.peak_mapped_bytes / 1e6) for node in nodes},
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="on the disk to measure; a temporary directory by default")
    parser.add_argument(
        "--source", type=Path, help="where the weights to publish are written; the same disk by default"
    )
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--memory-mb", type=int, default=1024, help="anonymous memory that each process may have")
    parser.add_argument("--deltas", type=int, default=3, help="results are medians over this number of deltas")
    parser.add_argument("--direct", action="store_true", help="a smaller model passes the page cache by, too")
    options = parser.parse_args()
    count = sum(rows * columns for _, (rows, columns) in shapes_of(options.hidden, options.layers))
    with tempfile.TemporaryDirectory(dir=options.dir) as name, ExitStack() as stack:
        source = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.source)) if options.source else name)
        beside = not options.source and options.deltas > 1
        copies = {name: DISK_COPIES + beside} | ({str(source): 1.0} if options.source else {})
        for directory, share in copies.items():
            free, needed = shutil.disk_usage(directory).free, int(share * 2 * count)
            print(
                f"model {2 * count / 1e9:.2f} GB; needs {needed / 1e9:.1f} GB in {directory}",
                file=sys.stderr,
                flush=True,
            )
            if needed > free:
                sys.exit(f"Only {free / 1e9:.1f} GB are free there; name another disk.")
        sizes = (options.hidden, options.layers, options.memory_mb << 20, options.deltas, options.direct)
        print(json.dumps(measure(Path(name), source / "source.raw", *sizes)))


if __name__ == "__main__":
    main()
