"""How many signed requests one coordinator serves: heartbeats, leases and submissions of 10,000 workers, made beforehand.

    python benchmarks/coordinator_load.py [--workers 10000] [--requests 40000] [--postgres]

The coordinator of a real run directory has one core. `wrk` sends from the other: per worker and turn a lease, a heartbeat, the
submission of that lease, a heartbeat. The same number of requests comes from 100 and from all workers; `growth` compares
the coordinator's processor time per request. At the end the coordinator is killed with SIGKILL and its store is counted:
a lease that was answered but is not there is lost.
"""

import argparse
import contextlib
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from shoal.config import build_config, to_toml
from shoal.coordinator.assignments import lease_name
from shoal.coordinator.database import Connection, open_database
from shoal.coordinator.store import Store
from shoal.files import digest_bytes, write_atomic
from shoal.identity import Keypair
from shoal.protocol import api
from shoal.protocol.client import SUBMISSION_SIGNATURE_HEADER, CoordinatorClient
from shoal.protocol.descriptor import FileReference, RunDescriptor
from shoal.protocol.signing import BODY_HEADER, PROTOCOL_VERSION, stamp_request, submission_message
from shoal.rundir import ROLES, RunDirectory

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

CONNECTIONS = 32
UPLOAD_BYTES = 2048
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
local position, answers, refused, granted, started = 1, 0, 0, 0, nil
local total = tonumber(os.getenv("TOTAL"))
function request()
  started = started or seconds()
  if position > #data then return "GET /v1/relays HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n" end
  local size = tonumber(data:sub(position, position + 7))
  local text = data:sub(position + 8, position + 7 + size)
  position = position + 8 + size
  return text
end
function response(status, headers, body)
  answers = answers + 1
  if answers > total then return end
  if status ~= 200 then
    refused = refused + 1
    if refused <= 3 then print("REFUSED " .. status .. " " .. body) end
  end
  if body:find('"lease":{', 1, true) then granted = granted + 1 end
  if answers < total then return end
  local out = io.open(os.getenv("DONE") .. ".tmp", "w")
  out:write(string.format('{"seconds": %.4f, "refused": %d, "granted": %d}', seconds() - started, refused, granted))
  out:close()
  os.rename(os.getenv("DONE") .. ".tmp", os.getenv("DONE"))
  wrk.thread:stop()
end
function done(summary, latency, requests)
  print("LATENCY " .. string.format('{"p50_ms": %.2f, "p99_ms": %.2f}',
    latency:percentile(50) / 1000, latency:percentile(99) / 1000))
end
"""


def make_run(root: Path, store: str, port: int, leases: int) -> RunDirectory:
    directory = RunDirectory(root)
    for role in (*ROLES, "run"):
        directory.key(role)
    secret = directory.create_secret(seed=1)
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
                "clock_window_s": 3600,
                "requests_per_s_key": 0,
                "requests_per_s_address": 0,
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
        secret_commitment=digest_bytes(secret),
    )
    write_atomic(directory.descriptor_file, descriptor.seal(directory.key("run")).to_bytes())
    return directory


def register(directory: RunDirectory, store_url: str, keys: list[Keypair]) -> None:
    """Puts the workers into the store, every other one proven, as a run of some days would have them."""

    def insert(connection: Connection) -> None:
        connection.executemany(
            "INSERT INTO workers (key, name, engine, numerics_class, tokens_per_s, registered_at, state, clean_audits)"
            " VALUES (?,?,'torch',?,0.2,?,?,?)",
            [
                (
                    key.public,
                    f"worker-{number}",
                    NUMERICS,
                    time.time(),
                    *((("active", 10), ("probation", 0))[number % 2]),
                )
                for number, key in enumerate(keys)
            ],
        )

    store = Store(open_database(store_url, directory.store))
    store.write(insert)
    store.close()


class Requests:
    """The requests of a stream, signed and spelled out as bytes."""

    def __init__(self, directory: RunDirectory, port: int) -> None:
        self._descriptor, self._secret, self._host = directory.descriptor(), directory.secret(), f"127.0.0.1:{port}"

    def stream(self, keys: list[Keypair], total: int) -> bytes:
        parts: list[bytes] = []
        turn = 0
        while len(parts) < total:
            parts += [self._json(key, "/v1/leases", _lease_body(turn)) for key in keys]
            parts += [self._json(key, "/v1/heartbeat", HEARTBEAT) for key in keys]
            parts += [self._submission(key, turn) for key in keys]
            parts += [self._json(key, "/v1/heartbeat", HEARTBEAT) for key in keys]
            turn += 1
        return b"".join(b"%08d" % len(part) + part for part in parts[:total])

    def _json(self, key: Keypair, path: str, body: bytes) -> bytes:
        return self._request(key, "POST", path, body, {"content-type": "application/json"})

    def _submission(self, key: Keypair, turn: int) -> bytes:
        lease_id, data = lease_name(self._secret, key.public, f"request-{turn:06}"), secrets.token_bytes(UPLOAD_BYTES)
        digest = digest_bytes(data)
        signature = key.sign(submission_message(self._descriptor.run_id, lease_id, digest))
        headers = {BODY_HEADER: digest, SUBMISSION_SIGNATURE_HEADER: signature}
        return self._request(key, "PUT", f"/v1/submissions/{lease_id}", data, headers)

    def _request(self, key: Keypair, method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        stamp = stamp_request(
            key,
            self._descriptor.run_id,
            self._descriptor.coordinator_key,
            method,
            path,
            "",
            digest_bytes(body),
            time.time(),
        )
        lines = {"host": self._host, "content-length": str(len(body))} | headers | stamp.headers()
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


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


def drive(port: int, requests: bytes, total: int, work: Path) -> dict[str, float]:
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
    figures = dict(json.loads(done.read_text()))
    for line in output.splitlines():
        if line.startswith("LATENCY "):
            figures |= json.loads(line.removeprefix("LATENCY "))
        elif line.startswith("REFUSED"):
            print(line, flush=True)
    return figures


def measure(store_url: str, workers: int, total: int) -> dict[str, float]:
    work = Path(tempfile.mkdtemp(prefix="shoal-load-"))
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        total -= total % (4 * workers)
        directory = make_run(work / "run", store_url, port, total // 4)
        keys = [Keypair.generate() for _ in range(workers)]
        register(directory, store_url, keys)
        requests = Requests(directory, port).stream(keys, total)
        with serving(directory, port) as process:
            trainer = CoordinatorClient.for_run(directory.descriptor(), directory.key("trainer"), "")
            digest = "0" * 64
            trainer.publish(api.VersionBody(version=0, manifest_digest=digest, weights_digest=digest, bytes_total=1))
            before = cpu_seconds(process.pid)
            figures = drive(port, requests, total, work)
            cpu_s = cpu_seconds(process.pid) - before
            started = time.monotonic()
            trainer.status()
            status_ms = 1000 * (time.monotonic() - started)
            process.send_signal(signal.SIGKILL)
        counts = count(directory, store_url)
        return (
            figures
            | counts
            | {
                "workers": workers,
                "requests": total,
                "requests_per_s": round(total / figures["seconds"], 1),
                "cpu_us_per_request": round(1e6 * cpu_s / total, 1),
                "status_ms": round(status_ms, 1),
                "lost_leases": figures["granted"] - counts["leases"],
                "lost_submissions": total // 4 - counts["submissions"],
            }
        )
    finally:
        shutil.rmtree(work, ignore_errors=True)


def count(directory: RunDirectory, store_url: str) -> dict[str, float]:
    """What the store holds after the coordinator was killed."""
    store = Store(open_database(store_url, directory.store))
    sql = "SELECT COUNT(*) AS n, COUNT(DISTINCT slot) AS slots FROM leases"
    leases = store.read(lambda connection: dict(connection.execute(sql).fetchone()))
    kept = store.read(lambda connection: connection.execute("SELECT submission_id FROM submissions").fetchall())
    store.close()
    assert leases["n"] == leases["slots"], "a slot was given twice"
    files = sum((directory.submissions / f"{row['submission_id']}.parquet").exists() for row in kept)
    return {"leases": leases["n"], "submissions": files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=2, help="pairs of the small and the large swarm; the best counts")
    parser.add_argument("--postgres-requests", type=int, default=8_000, help="0 leaves PostgreSQL out")
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed: run `make system`")
    small: list[dict[str, float]] = []
    large: list[dict[str, float]] = []
    for _ in range(options.rounds):
        for workers, results in ((100, small), (options.workers, large)):
            results.append(measure("sqlite", workers, options.requests))
            print(json.dumps(results[-1]), flush=True)
    best = max(large, key=lambda one: one["requests_per_s"])
    growth = min(one["cpu_us_per_request"] for one in large) / min(one["cpu_us_per_request"] for one in small)
    result: dict[str, object] = {
        "workers": options.workers,
        "requests": int(best["requests"]),
        "requests_per_s": best["requests_per_s"],
        "p50_ms": best["p50_ms"],
        "p99_ms": best["p99_ms"],
        "cpu_us_per_request": best["cpu_us_per_request"],
        "growth": round(growth, 3),
        "status_ms": best["status_ms"],
        "lost_leases": sum(int(one["lost_leases"]) for one in small + large),
        "lost_submissions": sum(int(one["lost_submissions"]) for one in small + large),
        "mix": "1 lease, 1 submission, 2 heartbeats",
        "machine": f"{platform.machine()}, server on one core, wrk on another",
    }
    if options.postgres_requests:
        result |= on_postgres(min(options.workers, options.postgres_requests // 4), options.postgres_requests)
    print(json.dumps(result))


def on_postgres(workers: int, total: int) -> dict[str, object]:
    from coordinator.postgres import is_installed, postgres_server

    if not is_installed():
        sys.exit("PostgreSQL is not installed: run `make system`")
    with postgres_server() as url:
        figures = measure(url, workers, total)
    print(json.dumps(figures), flush=True)
    return {
        "requests_per_s_postgres": figures["requests_per_s"],
        "p99_ms_postgres": figures["p99_ms"],
        "lost_leases_postgres": int(figures["lost_leases"]),
    }


if __name__ == "__main__":
    main()
