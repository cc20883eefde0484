"""A frame policy in a real swarm: warm start by imitation, then reinforcement learning with a cheater among the workers.

    python examples/recurrence/run.py [--smoke] [--workers 2] [--fresh] [--warm-start] [--SECTION.FIELD VALUE ...]

Makes a policy that knows nothing, tasks and demonstrations; lets it learn the demonstrations; measures the limits of verdicts;
and runs the swarm of run.toml: coordinator, trainer, two relays, validator, evaluator, honest workers, and one worker that keeps
old weights. Each part is a command that is printed before it runs; the same command goes on where it was stopped. The last line
is one JSON object with `heldout_start` and `heldout_end`; the exit code is 1 if a promise was broken. `--smoke` proves the path.
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shoal.config import ShoalConfig, load_config
from shoal.errors import ShoalError
from shoal.files import write_atomic
from shoal.host.demo import INTERRUPTED, Promise, run_demo

ROOT = Path(__file__).resolve().parents[2]
RUN_FILE = ROOT / "examples/recurrence/run.toml"
CHEATS = ("stale",)
START_AT_MOST, RISE = 0.75, 0.1
"""Of held-out success: after the warm start, and by how much reinforcement learning has to raise it."""
SMOKE = (
    *("--run.steps", "3", "--run.dir", "runs/recurrence-smoke", "--run.name", "recurrence-smoke"),
    *("--model.path", "build/recurrence-smoke/warm", "--tasks.source", "build/recurrence-smoke/tasks.jsonl"),
    *("--validation.calibration", "build/recurrence-smoke/calibration.json", "--tasks.heldout", "64"),
    *("--training.groups_per_step", "8", "--evaluation.every", "1"),
)
EPOCHS, SMOKE_EPOCHS = 16, 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="three small steps instead of the whole run")
    parser.add_argument("--workers", type=int, default=2, help="honest ones")
    parser.add_argument("--fresh", action="store_true", help="start the swarm over; the warm start is kept")
    parser.add_argument("--warm-start", action="store_true", help="end before the swarm")
    options, others = parser.parse_known_args()
    settings = (*(SMOKE if options.smoke else ()), *others)
    try:
        run(options, settings)
    except ShoalError as error:
        raise SystemExit(f"run.py: {error}") from None


def run(options: argparse.Namespace, settings: tuple[str, ...]) -> None:
    config = load_config(RUN_FILE, settings)
    warm_start_s = warm_start(config, SMOKE_EPOCHS if options.smoke else EPOCHS, settings)
    if options.warm_start:
        return
    started = time.monotonic()
    promise = Promise(CHEATS, START_AT_MOST, None)
    code = run_demo(config, honest_workers=options.workers, fresh=options.fresh, promise=promise)
    if code == INTERRUPTED:
        raise SystemExit(code)
    swarm_s = time.monotonic() - started
    found = metrics(config) | {"warm_start_s": warm_start_s, "swarm_s": round(swarm_s)}
    found["seconds"] = None if warm_start_s is None else warm_start_s + round(swarm_s)
    broken = not options.smoke and not rises(found)
    if broken:
        print(f"failed: held-out success rose by less than {RISE}.", file=sys.stderr)
    print(json.dumps(found))
    raise SystemExit(code or int(broken))


def warm_start(config: ShoalConfig, epochs: int, settings: tuple[str, ...]) -> int | None:
    """Seconds that its parts took, now or when they were made; none if that is not known. What exists is kept."""
    warm, limits = ROOT / config.model.path, ROOT / config.validation.calibration
    build = warm.parent
    lessons = build / "demonstrations.jsonl"
    parts = [_run(lessons, "examples/recurrence/prepare.py", str(build))]
    parts += [_run(warm, "-m", "shoal", "sft", str(lessons), str(warm), "--model", str(build / "fresh"),
                   "--no-filters", "--no-thinking", "--epochs", str(epochs), "--learning-rate", "3e-3",
                   "--threads", "1", "--micro-batch-tokens", "32768")]  # fmt: skip
    parts += [_run(limits, "-m", "shoal", "calibrate", str(limits), str(RUN_FILE), "--prompts", "96", *settings)]
    known = [seconds for seconds in parts if seconds is not None]
    return round(sum(known)) if len(known) == len(parts) else None


def _run(made: Path, *arguments: str) -> float | None:
    """Runs a command unless what it makes is there; its seconds, if nobody stopped it on the way, are kept beside it."""
    note = made.with_name(f"{made.name}.seconds")
    if not made.exists():
        print(f"$ {shlex.join(['python', *arguments])}", flush=True)
        started = time.monotonic()
        done = subprocess.run([sys.executable, *arguments], cwd=ROOT, check=False)
        if done.returncode:
            raise SystemExit(done.returncode)
        write_atomic(note, f"{time.monotonic() - started:.1f}".encode())
    return float(note.read_text()) if note.exists() else None


def metrics(config: ShoalConfig) -> dict[str, Any]:
    summary = json.loads((ROOT / config.run.dir / "summary.json").read_text())
    names = ("heldout_start", "heldout_end", "cheaters", "cheaters_banned", "honest_rejected", "ledger_ok", "steps")
    curve = [{name: row.get(name) for name in ("version", "accuracy", "at_s")} for row in summary["evaluations"]]
    found = {
        "benchmark": "recurrence",
        **{name: summary[name] for name in names},
        "heldout_tasks": config.tasks.heldout,
    }
    return {**found, "rise_interval": rise_interval(found), "curve": curve}


def rise_interval(found: dict[str, Any]) -> list[float] | None:
    """95 % of the rise, by the normal approximation, as if the end were one evaluation; it is the mean of several."""
    start, end, tasks = found["heldout_start"], found["heldout_end"], found["heldout_tasks"]
    if start is None or end is None:
        return None
    half = 1.96 * math.sqrt((start * (1 - start) + end * (1 - end)) / tasks)
    return [round(end - start - half, 4), round(end - start + half, 4)]


def rises(found: dict[str, Any]) -> bool:
    return found["heldout_end"] is not None and found["heldout_end"] - found["heldout_start"] >= RISE


if __name__ == "__main__":
    main()
