"""Megabytes and seconds of an install from nothing: what a relay needs, and what a worker needs.

    python benchmarks/install.py [--without-worker]

The wheel is built and installed into an empty environment outside the repository, with the tested versions and without a cache of
downloads. `relay_s` is the time from nothing to a relay that serves the first head of an origin: install, start, fetch, verify.
Megabytes are those of the files in site-packages, without those of pip itself. Seconds depend on the link and on what else runs.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from urllib.error import URLError

sys.path.insert(0, str(Path(__file__).parents[1]))

from shoal.broadcast import Origin, OriginServer, WireTensor
from shoal.identity import Keypair
from tools.wheel import build_wheel, install

TOOLS = ("pip", "setuptools", "_distutils_hack", "pkg_resources")
"""What a new environment has anyway."""
SERVE_DEADLINE_S = 120.0


def installed_mb(environment: Path) -> float:
    (site,) = (environment / "lib").glob("python*/site-packages")
    places = [place for place in site.iterdir() if not place.name.startswith(TOOLS)]
    files = [file for place in places for file in (place.rglob("*") if place.is_dir() else [place])]
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def relay_s(work: Path, wheel: Path) -> float:
    key = Keypair.generate()
    origin = Origin(work / "origin", key)
    origin.stage(0, [WireTensor("weight", "bfloat16", (1000,), bytes(2000))])
    origin.announce(ledger_head="")
    server = OriginServer(origin.store, "127.0.0.1", 0)
    server.start()
    started = time.monotonic()
    shoal = install(work / "relay", str(wheel)) / "shoal"
    relay = subprocess.Popen(
        [shoal, "relay", "--upstream", server.url, "--port", "0", "--run-key", key.public],
        cwd=work / "relay",
        env={"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert relay.stdout is not None
        url = next(line.split()[2].rstrip(",") for line in relay.stdout if line.startswith("relay at "))
        _wait_for_head(url)
        return time.monotonic() - started
    finally:
        relay.terminate()
        relay.wait(SERVE_DEADLINE_S)
        server.stop()


def _wait_for_head(url: str) -> None:
    until = time.monotonic() + SERVE_DEADLINE_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/head.json", timeout=5).close()
            return
        except (URLError, OSError):
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-worker", action="store_true", help="measure the relay only")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        wheel = build_wheel(work / "wheel")
        result: dict[str, object] = {"relay_s": round(relay_s(work, wheel), 1)}
        result["relay_mb"] = round(installed_mb(work / "relay"))
        if not chosen.without_worker:
            started = time.monotonic()
            install(work / "worker", f"{wheel}[worker]")
            result["worker_s"] = round(time.monotonic() - started, 1)
            result["worker_mb"] = round(installed_mb(work / "worker"))
    result |= {"wheel": wheel.name, "python": platform.python_version(), "cores": os.cpu_count()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
