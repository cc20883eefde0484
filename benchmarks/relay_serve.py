"""Bytes per second of our relay against nginx, for the same shards over the same connections.

    python benchmarks/relay_serve.py [--megabytes 128] [--seconds 1.5] [--rounds 7]

A version is published into a directory that nginx serves with one worker; our relay, one process too, follows nginx until it has
every shard. The same client process then asks both for whole 2 MB shards over 1 and over 64 connections that stay open, and throws
the bytes away. Rounds alternate between the two; the figure is the ratio of medians.
"""

import argparse
import json
import os
import platform
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.broadcast import Origin, WeightClient, WireTensor
from shoal.identity import Keypair

NGINX_SITE = """
daemon off;
pid {work}/nginx.pid;
error_log stderr crit;
worker_processes 1;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000;
  client_body_temp_path {work}/body; proxy_temp_path {work}/proxy; fastcgi_temp_path {work}/fastcgi;
  uwsgi_temp_path {work}/uwsgi; scgi_temp_path {work}/scgi;
  server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""
OURS = """
import sys, threading
from pathlib import Path
from shoal.broadcast import Relay, RelaySettings
relay = Relay(RelaySettings(Path(sys.argv[1]), [sys.argv[3]], sys.argv[4], port=int(sys.argv[2])))
relay.start()
threading.Event().wait()
"""


@contextmanager
def serving(command: list[str], port: int) -> Iterator[int]:
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fetch_until(port: int, paths: list[str], first: int, stop_at: float, received: list[int]) -> None:
    sink = memoryview(bytearray(1 << 20))
    number = first
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        while time.monotonic() < stop_at:
            connection.sendall(f"GET {paths[number % len(paths)]} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            number += 7
            answer = b""
            while b"\r\n\r\n" not in answer:
                answer += connection.recv(4096)
            header, _, body = answer.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", header.lower())
            if length is None or b" 200 " not in header:
                raise RuntimeError(header.decode())
            left = int(length[1]) - len(body)
            while left:
                left -= connection.recv_into(sink, min(left, len(sink)))
            received[first] += int(length[1])


def bytes_per_second(port: int, paths: list[str], connections: int, seconds: float) -> float:
    received = [0] * connections
    started = time.monotonic()
    threads = [
        threading.Thread(target=fetch_until, args=(port, paths, number, started + seconds, received))
        for number in range(connections)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(received) / (time.monotonic() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if shutil.which("nginx") is None:
        sys.exit("nginx is not installed; `make system` installs it.")
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        work = Path(name)
        work.chmod(0o755)
        key = Keypair.generate()
        origin = Origin(work / "origin", key)
        size_bytes = options.megabytes << 20
        published = origin.stage(0, [WireTensor("w", "bfloat16", (size_bytes // 2,), os.urandom(size_bytes))])
        origin.announce(ledger_head="")
        paths = [f"/shards/{digest}" for digest in origin.store.held("shards")]
        ports = {"nginx": free_port(), "ours": free_port()}
        config = work / "nginx.conf"
        config.write_text(NGINX_SITE.format(work=work, port=ports["nginx"], root=origin.root))
        upstream = f"http://127.0.0.1:{ports['nginx']}"
        relay = [sys.executable, "-c", OURS, str(work / "relay"), str(ports["ours"]), upstream, key.public]
        speeds: dict[tuple[str, int], list[float]] = {}
        with (
            serving(["nginx", "-c", str(config)], ports["nginx"]),
            serving(relay, ports["ours"]),
        ):
            client = WeightClient(key.public, lambda: [f"http://127.0.0.1:{ports['ours']}"], work / "client")
            client.head(newer_than=0, wait_s=60)
            client.fetch_version(0, published.manifest_digest)
            for _ in range(options.rounds):
                for connections in (1, 64):
                    for side, port in ports.items():
                        speed = bytes_per_second(port, paths, connections, options.seconds)
                        speeds.setdefault((side, connections), []).append(speed)
    median = {key: statistics.median(values) for key, values in speeds.items()}
    results = {f"ratio_{count}": round(median["ours", count] / median["nginx", count], 3) for count in (1, 64)}
    rates = {f"{side}_{count}_mb_s": round(speed / 1e6) for (side, count), speed in median.items()}
    print(json.dumps({**results, **rates, "machine": f"{platform.machine()}, {os.cpu_count()} cores"}))


if __name__ == "__main__":
    main()
