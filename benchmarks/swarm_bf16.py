"""A swarm of the demo's shape whose only numerics class is bfloat16: does it learn, and who is banned?

    python benchmarks/swarm_bf16.py [--steps 24] [--workers 3]

The owner's commands are those of the guide: `shoal init` and `shoal up` with `validation.numerics_classes` set. Beside the honest
workers, two cheaters join as strangers do: `stale` keeps the first weights and shows old proofs, `int4` computes with int4 weights
and commits to what it computed.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NUMERICS = "torch/bfloat16/cpu"
CHEATS = ("stale", "int4")
PORT = 17300
LONGEST_S = 660
KEPT = (
    "steps",
    "wall_s",
    "heldout_start",
    "heldout_end",
    "honest_workers",
    "honest_rejected",
    "cheaters",
    "cheaters_banned",
    "ledger_ok",
    "verdicts",
    "max_staleness",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--workers", type=int, default=3, help="honest ones")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        summary = run_swarm(Path(directory), options.steps, options.workers)
    bans = [{key: ban[key] for key in ("worker", "at_s", "reason")} for ban in summary["bans"]]
    machine = platform.processor() or platform.machine()
    kept = {name: summary[name] for name in KEPT}
    print(
        json.dumps({"benchmark": "swarm in bfloat16", "machine": machine, "numerics": NUMERICS, **kept, "bans": bans})
    )


def run_swarm(directory: Path, steps: int, workers: int) -> dict[str, Any]:
    run, url = directory / "run", f"http://127.0.0.1:{PORT}"
    settings = {
        "run.dir": str(run),
        "run.steps": str(steps),
        "validation.numerics_classes": json.dumps([NUMERICS]),
        "coordinator.port": str(PORT),
        "broadcast.port": str(PORT + 1),
    }
    given = [part for name, value in settings.items() for part in (f"--{name}", value)]
    subprocess.run([*shoal(), "init", str(ROOT / "configs" / "demo.toml"), *given], check=True, stdout=sys.stderr)
    swarm = subprocess.Popen([*shoal(), "up", str(run), "--workers", str(workers)], stdout=sys.stderr)
    cheaters: list[subprocess.Popen[bytes]] = []
    env = {**os.environ, "TMPDIR": str(directory)}
    try:
        time.sleep(2)  # a stranger who comes earlier waits until the coordinator answers
        for cheat in CHEATS:
            place = ["--dir", str(directory / cheat), "--threads", "1", "--name", f"cheater-{cheat}"]
            cheaters.append(
                subprocess.Popen([*shoal(), "work", url, *place, "--cheat", cheat], stdout=subprocess.DEVNULL, env=env)
            )
        swarm.wait(LONGEST_S)
    finally:
        for process in (*cheaters, swarm):
            process.terminate()
            process.wait(60)
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def shoal() -> list[str]:
    """The command, in a process that knows one more cheat."""
    return [sys.executable, __file__, "--shoal"]


def shoal_with_int4() -> None:
    from safetensors.torch import load_file, save_file

    from shoal.cli.main import main as command
    from shoal.files import WEIGHTS_FILE
    from shoal.policy.directory import weight_files
    from shoal.validation.calibration.forgeries import quantised
    from shoal.worker import CHEATERS, Worker
    from shoal.worker.slots import Version

    class Int4Cheater(Worker):
        """Saves memory: computes with a quarter of the bits."""

        def policy_path(self, version: Version, *, deadline_s: float) -> Path:
            return coarse(super().policy_path(version, deadline_s=deadline_s))

    @cache
    def coarse(path: Path) -> Path:
        target = Path(tempfile.mkdtemp(prefix="int4-"))
        tensors = {name: tensor for file in weight_files(path) for name, tensor in load_file(file).items()}
        rounded = {name: tensor.contiguous() for name, tensor in quantised(4)(tensors).items()}
        save_file(rounded, target / WEIGHTS_FILE, {"format": "pt"})
        return target

    CHEATERS["int4"] = Int4Cheater
    sys.argv[1:] = sys.argv[2:]
    command()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--shoal"]:
        shoal_with_int4()
    else:
        main()
