"""How many signed requests one coordinator serves: heartbeats, leases and submissions of 10,000 workers, made beforehand.

    python benchmarks/coordinator_load.py [--workers 10000] [--requests 100000] [--part sqlite|dense|postgres]
    python benchmarks/coordinator_load.py --hostile [--connections 10000] [--seconds 20] [--rounds 2]

The coordinator of a real run directory has one core. `wrk` sends from the other: per worker and turn a lease, four heartbeats, the
submission of that lease with its upload, four heartbeats, as a worker does that needs 40 s for a slot; in the *dense* mix one
heartbeat instead of four. The same number of requests comes from 100 and from all workers; `growth` compares the coordinator's
processor time per request. At the end the coordinator is killed with SIGKILL, and every answer is held against its store: a lease
or a submission that was answered but is not there, with the same slot and the same bytes, is lost.

`--hostile` measures heartbeats of keys with accepted work instead, with and without 10,000 hostile connections in turn: a third
says nothing, a third sends half a head byte by byte, a third a large unsigned body slowly; each comes back when it is closed. They
come from 250 addresses, from one, and from the address of the workers themselves. The default limits of a run hold.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import platform
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.config import build_config, to_toml
from shoal.coordinator.store.database import open_database
from shoal.coordinator.store.rows import insert
from shoal.coordinator.store.tables import WorkerRow
from shoal.coordinator.store.writer import Store
from shoal.coordinator.work.leasing import lease_name
from shoal.files import digest_bytes, digest_file, write_atomic
from shoal.identity import Keypair
from shoal.net import raise_file_limit
from shoal.protocol import api
from shoal.protocol.client import SUBMISSION_SIGNATURE_HEADER, CoordinatorClient
from shoal.protocol.descriptor import FileReference, RunDescriptor
from shoal.protocol.signing import PROTOCOL_VERSION, RequestTarget, stamp_request, submission_message
from shoal.protocol.steps import secret_commitment
from shoal.rundir import ROLES, RunDirectory

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

CONNECTIONS = 64
UPLOAD_BYTES = 8192
USUAL_HEARTBEATS, DENSE_HEARTBEATS = 8, 2
"""Per lease."""
LONGEST_S = 600.0
NUMERICS = "torch/float32/cpu"
SERVE = """
import os, sys
from pathlib import Path
os.sched_setaffinity(0, {0})
from shoal.coordinator import run_coordinator
from shoal.rundir import RunDirectory
run_coordinator(RunDirectory(Path(sys.argv[1])), on_ready=lambda url: print("ready", flush=True))
"""
SCRIPT = """
local ffi = require("ffi")
ffi.cdef[[ typedef struct { long s; long us; } shoal_time; int gettimeofday(shoal_time *now, void *zone); ]]
local function seconds()
  local now = ffi.new("shoal_time")
  ffi.C.gettimeofday(now, nil)
  return tonumber(now.s) + tonumber(now.us) / 1e6
end
local file = io.open(os.getenv("REQUESTS"), "rb")
local data = file:read("*all")
file:close()
local position, answers, refused, started = 1, 0, 0, nil
local leases, submissions = {}, {}
local total = tonumber(os.getenv("TOTAL"))
local idle = "GET /v1/relays HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n"
local rehearsed = false
function request()
  if not rehearsed then  -- wrk asks once before it begins, and throws the request away
    rehearsed = true
    return idle
  end
  started = started or seconds()
  if position > #data then return idle end
  local size = tonumber(data:sub(position, position + 7))
  local text = data:sub(position + 8, position + 7 + size)
  position = position + 8 + size
  return text
end
function delay()
  return position > #data and 300 or 0  -- a connection with nothing left to send waits for the others
end
function response(status, headers, body)
  if body:sub(1, 10) == '{"relays":' then return end
  answers = answers + 1
  if answers > total then return end
  if status ~= 200 then
    refused = refused + 1
    if refused <= 3 then print("REFUSED " .. status .. " " .. body) end
  end
  local lease, slot = body:match('"lease_id":"(%x+)"'), body:match('"slot":(%d+)')
  if lease and slot then leases[#leases + 1] = '"' .. lease .. '":' .. slot end
  local submission = body:match('^{"submission_id":"(%x+)"')
  if submission then submissions[#submissions + 1] = '"' .. submission .. '"' end
  if answers < total then return end
  local took = seconds() - started
  local out = io.open(os.getenv("DONE") .. ".tmp", "w")
  out:write(string.format('{"seconds": %.4f, "refused": %d, "leases": {%s}, "submissions": [%s]}',
    took, refused, table.concat(leases, ","), table.concat(submissions, ",")))
  out:close()
  os.rename(os.getenv("DONE") .. ".tmp", os.getenv("DONE"))
  wrk.thread:stop()
end
function done(summary, latency, requests)
  print("LATENCY " .. string.format('{"p50_ms": %.2f, "p99_ms": %.2f}',
    latency:percentile(50) / 1000, latency:percentile(99) / 1000))
end
"""


UNLIMITED = {"requests_per_s_key": 0, "requests_per_s_address": 0}


def make_run(root: Path, store: str, port: int, leases: int, limits: dict[str, object] | None = None) -> RunDirectory:
    directory = RunDirectory(root)
    for role in (*ROLES, "run"):
        directory.key(role)
    secret = directory.create_secret()
    config = build_config(
        {
            "run": {"name": "load", "dir": str(root)},
            "rollouts": {"group_size": 2, "tasks_per_slot": 1, "max_new_tokens": 64},
            "training": {"groups_per_step": 4 * leases, "oversampling": 4.0},
            "trust": {"probation_share": 1.0},
            "coordinator": {
                "port": port,
                "store": store,
                "lease_s": 3600,
                "gone_after_s": 3600,
                **(UNLIMITED if limits is None else limits),
            },
        }
    )
    write_atomic(directory.run_file, to_toml(config).encode())
    descriptor = RunDescriptor(
        run_id="load",
        protocol=PROTOCOL_VERSION,
        run_key=directory.key("run").public,
        coordinator_key=directory.key("coordinator").public,
        coordinator_url=config.coordinator_url,
        relay_urls=(),
        model_files={"config.json": FileReference(digest="ab" * 32, bytes=1)},
        tasks=config.tasks,
        task_set_digest="cd" * 32,
        task_count=100,
        rollouts=config.rollouts,
        reward=config.reward,
        async_level=config.training.async_level,
        chunk_tokens=32,
        top_k=128,
        numerics_classes=(NUMERICS,),
        secret_commitment=secret_commitment(secret),
    )
    write_atomic(directory.descriptor_file, descriptor.seal(directory.key("run")).to_bytes())
    return directory


def register(directory: RunDirectory, store_url: str, keys: list[Keypair]) -> None:
    """Puts the workers into the store, every other one active, as a run of some days would have them."""

    trust = ({"state": "active", "clean_audits": 10}, {"state": "probation"})
    workers = [
        WorkerRow(key.public, f"worker-{number}", NUMERICS, 0.2, 0, 0.0, time.time(), accepted=1, **trust[number % 2])
        for number, key in enumerate(keys)
    ]
    store = Store(open_database(store_url, directory.store))
    store.write(lambda connection: insert(connection, *workers))
    store.close()


class Requests:
    """The requests of a stream, signed and spelled out as bytes."""

    def __init__(self, directory: RunDirectory, port: int) -> None:
        self._descriptor, self._secret, self._host = directory.descriptor(), directory.secret(), f"127.0.0.1:{port}"

    def stream(self, keys: list[Keypair], turns: int, heartbeats: int) -> bytes:
        parts: list[bytes] = []
        for turn in range(turns):
            parts += [self._json(key, "/v1/leases", _lease_body(turn)) for key in keys]
            parts += self._heartbeats(keys, heartbeats // 2)
            parts += [self._submission(key, turn) for key in keys]
            parts += self._heartbeats(keys, heartbeats // 2)
        return b"".join(b"%08d" % len(part) + part for part in parts)

    def _heartbeats(self, keys: list[Keypair], count: int) -> list[bytes]:
        return [self._json(key, "/v1/heartbeat", HEARTBEAT) for _ in range(count) for key in keys]

    def _json(self, key: Keypair, path: str, body: bytes) -> bytes:
        return self._request(key, "POST", path, body, {"content-type": "application/json"})

    def _submission(self, key: Keypair, turn: int) -> bytes:
        lease_id, data = lease_name(self._secret, key.public, f"request-{turn:06}"), secrets.token_bytes(UPLOAD_BYTES)
        digest = digest_bytes(data)
        signature = key.sign(submission_message(self._descriptor.run_id, lease_id, digest))
        headers = {SUBMISSION_SIGNATURE_HEADER: signature}
        return self._request(key, "PUT", f"/v1/submissions/{lease_id}", data, headers)

    def _request(self, key: Keypair, method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        run = self._descriptor
        target = RequestTarget(run.run_id, run.coordinator_key, method, path, "", digest_bytes(body))
        stamp = stamp_request(key, target, time.time() + AHEAD_S)
        lines = {"host": self._host, "content-length": str(len(body))} | headers | stamp.headers()
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


AHEAD_S = 250.0
"""Requests are signed for later, so that the last of a long stream is still within the coordinator's window."""
HEARTBEAT = api.HeartbeatBody(activity="generating", tokens_generated=1000, bytes_received=0).model_dump_json().encode()


def _lease_body(turn: int) -> bytes:
    return api.LeaseBody(request_id=f"request-{turn:06}", held_versions=[0]).model_dump_json().encode()


@contextlib.contextmanager
def serving(directory: RunDirectory, port: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", SERVE, str(directory.root)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "the coordinator did not start"
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline, "the coordinator does not listen"
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def drive(port: int, requests: bytes, total: int, work: Path) -> dict[str, Any]:
    """Sends the stream as fast as it is answered."""
    sent, done, script = work / "requests", work / "done.json", work / "load.lua"
    sent.write_bytes(requests)
    script.write_text(SCRIPT)
    command = ["taskset", "-c", "1", "wrk", "-t1", f"-c{CONNECTIONS}", "-d3600", "--timeout", "60"]
    command += ["-s", str(script), f"http://127.0.0.1:{port}"]
    environment = os.environ | {"REQUESTS": str(sent), "TOTAL": str(total), "DONE": str(done)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + LONGEST_S
    while not done.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)  # wrk sleeps through its whole time otherwise
    output, _ = process.communicate(timeout=60)
    assert done.exists(), output
    metrics = dict(json.loads(done.read_text()))
    for line in output.splitlines():
        if line.startswith("LATENCY "):
            metrics |= json.loads(line.removeprefix("LATENCY "))
        elif line.startswith("REFUSED"):
            print(line, flush=True)
    return metrics


def measure(store_url: str, workers: int, at_most: int, heartbeats: int) -> dict[str, Any]:
    work = Path(tempfile.mkdtemp(prefix="shoal-load-"))
    turns = at_most // (workers * (2 + heartbeats))
    total = turns * workers * (2 + heartbeats)
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        directory = make_run(work / "run", store_url, port, turns * workers)
        keys = [Keypair.generate() for _ in range(workers)]
        register(directory, store_url, keys)
        requests = Requests(directory, port).stream(keys, turns, heartbeats)
        with serving(directory, port) as process:
            trainer = CoordinatorClient.for_run(directory.descriptor(), directory.key("trainer"), "")
            digest = "0" * 64
            trainer.publish(api.VersionBody(version=0, manifest_digest=digest, weights_digest=digest, bytes_total=1))
            before = cpu_seconds(process.pid)
            answered = drive(port, requests, total, work)
            cpu_s = cpu_seconds(process.pid) - before
            started = time.monotonic()
            trainer.status()
            status_ms = 1000 * (time.monotonic() - started)
            process.send_signal(signal.SIGKILL)
        return {
            "workers": workers,
            "requests": total,
            "requests_per_s": round(total / answered["seconds"], 1),
            "p50_ms": answered["p50_ms"],
            "p99_ms": answered["p99_ms"],
            "cpu_us_per_request": round(1e6 * cpu_s / total, 1),
            "status_ms": round(status_ms, 1),
            "refused": answered["refused"],
            **losses(directory, store_url, answered, turns * workers),
        }
    finally:
        shutil.rmtree(work, ignore_errors=True)


def losses(directory: RunDirectory, store_url: str, answered: dict[str, Any], turns: int) -> dict[str, int]:
    """What was asked for and is not in the store of the killed coordinator exactly as it was answered."""
    store = Store(open_database(store_url, directory.store))
    slots = {row["lease_id"]: row["slot"] for row in rows(store, "SELECT lease_id, slot FROM leases")}
    digests = {
        row["submission_id"]: row["digest"] for row in rows(store, "SELECT submission_id, digest FROM submissions")
    }
    store.close()
    assert sorted(slots.values()) == list(range(len(slots))), "a slot was given twice or not at all"
    kept = [lease for lease, slot in answered["leases"].items() if slots.get(lease) == slot]
    whole = [name for name in answered["submissions"] if _is_whole(directory, name, digests.get(name, ""))]
    return {"lost_leases": turns - len(set(kept)), "lost_submissions": turns - len(set(whole))}


def rows(store: Store, sql: str) -> list[Any]:
    return store.read(lambda connection: connection.execute(sql).fetchall())


def _is_whole(directory: RunDirectory, submission_id: str, digest: str) -> bool:
    path = directory.submissions / f"{submission_id}.parquet"
    return path.exists() and digest_file(path) == digest


HOSTILE_MODES = {
    "many": [f"127.1.0.{number}" for number in range(1, 251)],
    "one": ["127.2.0.1"],
    "same": ["127.0.0.1"],
}
"""Where hostile connections come from; workers come from 127.0.0.1."""
BEATS_PER_S = 2.0
SETTLE_S = 5.0
OPEN_WITHIN_S = 300.0


def on_hostile(connections: int, seconds: float, rounds: int, workers: int = 64) -> dict[str, object]:
    """Heartbeats with and without hostile connections, in turn."""
    work = Path(tempfile.mkdtemp(prefix="shoal-hostile-"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    directory = make_run(work, "sqlite", port, 1, {"trusted_proxies": []})
    keys = [Keypair.generate() for _ in range(workers)]
    register(directory, "sqlite", keys)
    beats = int(seconds * BEATS_PER_S * rounds * 2 * len(HOSTILE_MODES) * 2)
    requests = Requests(directory, port)
    streams = [iter([requests._json(key, "/v1/heartbeat", HEARTBEAT) for _ in range(beats)]) for key in keys]
    waits: dict[str, list[float]] = {name: [] for name in ("none", *HOSTILE_MODES)}
    opened = dict.fromkeys(HOSTILE_MODES, 0)
    lost = 0
    try:
        with serving(directory, port) as process:
            for mode in [*HOSTILE_MODES] * rounds:
                for phase in ("none", mode):
                    with hostile(port, phase, connections) as count:
                        wait_until_open(count, connections if phase in HOSTILE_MODES else 0)
                        found, missed = asyncio.run(beat_all(port, streams, seconds))
                        opened |= {phase: max(opened[phase], count.value)} if phase in opened else {}
                    waits[phase] += found
                    lost += missed
                    print(json.dumps({"phase": phase, "p50_ms": _median_ms(found), "beats": len(found)}), flush=True)
            memory = Path(f"/proc/{process.pid}/status").read_text().partition("VmHWM:")[2].split()[0]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    without, worst = _median_ms(waits["none"]), max(_median_ms(waits[mode]) for mode in HOSTILE_MODES)
    return {
        "hostile_connections": connections,
        "heartbeat_p50_ms": worst,
        "heartbeat_p50_ms_without": without,
        "heartbeat_ratio": round(worst / without, 2),
        **{f"heartbeat_p50_ms_{mode}": _median_ms(waits[mode]) for mode in HOSTILE_MODES},
        **{f"heartbeat_p99_ms_{mode}": _percentile_ms(waits[mode], 0.99) for mode in ("none", *HOSTILE_MODES)},
        **{f"hostile_opened_{mode}": opened[mode] for mode in HOSTILE_MODES},
        "heartbeats": sum(map(len, waits.values())),
        "heartbeats_lost": lost,
        "coordinator_memory_mb": round(int(memory) / 1024, 1),
    }


def wait_until_open(count: Any, connections: int) -> None:
    """Returns when all of them were opened, however many the server has closed again."""
    deadline = time.monotonic() + OPEN_WITHIN_S
    while count.value < connections:
        assert time.monotonic() < deadline, f"only {count.value} of {connections} hostile connections were opened"
        time.sleep(0.2)
    time.sleep(SETTLE_S)


def _median_ms(seconds: list[float]) -> float:
    return round(1000 * statistics.median(seconds), 2)


def _percentile_ms(seconds: list[float], share: float) -> float:
    return round(1000 * sorted(seconds)[int(share * (len(seconds) - 1))], 2)


async def beat_all(port: int, streams: list[Iterator[bytes]], seconds: float) -> tuple[list[float], int]:
    """How long each heartbeat took, connecting again included, and how many were never answered."""
    waits: list[float] = []
    lost = 0

    async def beat(requests: Iterator[bytes], first_s: float) -> None:
        nonlocal lost
        until, connection = time.monotonic() + seconds, None
        await asyncio.sleep(first_s)
        while time.monotonic() < until:
            started = time.monotonic()
            try:
                async with asyncio.timeout(30):
                    connection = await _answered(port, next(requests), connection)
                waits.append(time.monotonic() - started)
            except TimeoutError:
                lost += 1
            await asyncio.sleep(1 / BEATS_PER_S)
        if connection is not None:
            connection[1].close()

    spread = 1 / BEATS_PER_S / len(streams)
    await asyncio.gather(*(beat(requests, number * spread) for number, requests in enumerate(streams)))
    return waits, lost


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _answered(port: int, request: bytes, connection: Connection | None) -> Connection:
    """Sends the request until it is answered; returns the connection that it was answered on."""
    while True:
        try:
            if connection is None:
                connection = await asyncio.open_connection("127.0.0.1", port)
            reader, writer = connection
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head.partition(b"\r\n")[0], head
            await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))
            return connection
        except (OSError, asyncio.IncompleteReadError):
            if connection is not None:
                connection[1].close()
            connection = None


@contextlib.contextmanager
def hostile(port: int, mode: str, connections: int) -> Iterator[Any]:
    """Hostile connections of another process, on the other core, while the block runs; counts those that were opened."""
    context = multiprocessing.get_context("fork")
    count = context.Value("q", 0)
    if mode not in HOSTILE_MODES:
        yield count
        return
    process = context.Process(target=attack, args=(port, HOSTILE_MODES[mode], connections, count), daemon=True)
    process.start()
    try:
        yield count
    finally:
        process.kill()
        process.join()


def attack(port: int, addresses: list[str], connections: int, count: Any) -> None:
    raise_file_limit()
    os.sched_setaffinity(0, {1})

    async def one(number: int, address: str) -> None:
        first, piece = HOSTILE_KINDS[number % len(HOSTILE_KINDS)]
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
                count.value += 1
                writer.write(first)
                ended = asyncio.create_task(reader.read())
                while not ended.done():
                    writer.write(piece)
                    await asyncio.wait([ended], timeout=1.0)
                writer.close()
            await asyncio.sleep(1.0)

    async def all_of_them() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # being cut off is what is expected
        await asyncio.gather(
            *(one(number, address) for number, address in zip(range(connections), itertools.cycle(addresses)))
        )

    asyncio.run(all_of_them())


HOSTILE_KINDS = (
    (b"", b""),
    (b"POST /v1/heartbeat HTTP/1.1\r\nhost: x\r\nx-shoal-key: ", b"a"),
    (b"POST /v1/leases HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n", b"{" * 4096),
)
"""What a hostile connection sends first, and then every second."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=2, help="pairs of the small and the large swarm; the best counts")
    parser.add_argument("--postgres-requests", type=int, default=100_000)
    parser.add_argument("--part", choices=("sqlite", "dense", "postgres"), action="append", help="all unless named")
    parser.add_argument("--hostile", action="store_true", help="heartbeats under hostile connections, and nothing else")
    parser.add_argument("--connections", type=int, default=10_000, help="hostile ones")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase with and without them")
    options = parser.parse_args()
    if options.hostile:
        raise_file_limit()
        result = on_hostile(options.connections, options.seconds, options.rounds)
        print(json.dumps({"machine": f"{platform.machine()}, {os.cpu_count()} cores", **result}))
        return
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed: run `make system`")
    parts = options.part or ["sqlite", "dense", "postgres"]
    result = {
        "workers": options.workers,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, server on one core, wrk on the other",
    }
    if "sqlite" in parts:
        result |= on_sqlite(options.workers, options.requests, options.rounds)
    if "dense" in parts:
        result |= on_sqlite_dense(options.workers, options.requests)
    if "postgres" in parts:
        result |= on_postgres(options.workers, options.postgres_requests)
    print(json.dumps(result))


def on_sqlite(workers: int, at_most: int, rounds: int) -> dict[str, object]:
    small: list[dict[str, Any]] = []
    large: list[dict[str, Any]] = []
    for _ in range(rounds):
        for count, results in ((100, small), (workers, large)):
            results.append(measure("sqlite", count, at_most, USUAL_HEARTBEATS))
            print(json.dumps(results[-1]), flush=True)
    best = max(large, key=lambda one: float(one["requests_per_s"]))
    growth = min(one["cpu_us_per_request"] for one in large) / min(one["cpu_us_per_request"] for one in small)
    shown = ("requests", "requests_per_s", "p50_ms", "p99_ms", "cpu_us_per_request", "status_ms")
    return {
        "mix": f"1 lease, 1 submission of {UPLOAD_BYTES} bytes, {USUAL_HEARTBEATS} heartbeats",
        **{name: best[name] for name in shown},
        "growth": round(growth, 3),
        **{name: sum(one[name] for one in small + large) for name in ("refused", "lost_leases", "lost_submissions")},
    }


def on_sqlite_dense(workers: int, at_most: int) -> dict[str, object]:
    return _named("dense", measure("sqlite", workers, at_most, DENSE_HEARTBEATS))


def on_postgres(workers: int, at_most: int) -> dict[str, object]:
    from support.postgres import is_installed, postgres_server

    if not is_installed():
        sys.exit("PostgreSQL is not installed: run `make system`")
    workers = min(workers, at_most // (2 + USUAL_HEARTBEATS))
    with postgres_server() as url:
        return _named("postgres", measure(url, workers, at_most, USUAL_HEARTBEATS))


def _named(name: str, metrics: dict[str, Any]) -> dict[str, object]:
    print(json.dumps(metrics), flush=True)
    return {f"{key}_{name}": value for key, value in metrics.items()}


if __name__ == "__main__":
    main()
