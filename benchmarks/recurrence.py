"""Models that integrate frames over time: up to which length each family tracks a state, and what a longer trained window is worth.

    python benchmarks/recurrence.py critical [--steps N]             # part 2: shell game and forward jumps
    python benchmarks/recurrence.py length [--steps 800] [--repo P]  # part 4: loss against trained length, and over time
    python benchmarks/recurrence.py swarm                            # part 5: a frame policy trained by a swarm
    python benchmarks/recurrence.py                                  # all

Every model is one piece, trained in a process of its own on one thread and stored below --pieces, so an interrupted run
continues. Times are CPU seconds of that thread: other work on the machine does not change them. `length` needs about 15 CPU
minutes, `critical` about 25.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.files import write_atomic

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTROL = (8, 128)
"""Length and batch of the run with as many frames per step as length 128 with batch 8."""
Piece = dict[str, Any]


def critical_piece(task: str, model: str, options: dict[str, Any]) -> Piece:
    from benchmarks.frame_experiments.critical_length import measure

    return measure(model, task, critical_plan(task, options))


def critical_plan(task: str, options: dict[str, Any]) -> Any:
    from benchmarks.frame_experiments.critical_length import PLANS

    plan = replace(PLANS[task], seed=options["seed"])
    return replace(plan, steps=options["steps"]) if options["steps"] else plan


def length_piece(length: int, batch: int, options: dict[str, Any]) -> Piece:
    from benchmarks.frame_experiments.length_scaling import SHAPE, Data, run

    plan = length_plan(options)
    data = Data.load(options["data"])
    result = run(length, batch, data, SHAPE, plan, is_control=batch != plan.batch)
    return {**result, "skipped_files": data.skipped, "train_actions": len(data.train)}


def length_plan(options: dict[str, Any]) -> Any:
    from benchmarks.frame_experiments.length_scaling import Plan

    return Plan(steps=options["steps"], least_s=options["least_s"], seed=options["seed"])


def length_folder(options: dict[str, Any]) -> str:
    """Runs of other data or another plan have another folder."""
    repository = options["repo"]
    data = f"commits-{hashlib.sha256(str(repository.resolve()).encode()).hexdigest()[:8]}" if repository else "repairs"
    return f"length-{data}-{options['steps']}-{options['least_s']:g}-{options['seed']}"


def length_data(folder: Path, options: dict[str, Any]) -> Path:
    """The sessions of all pieces, made once."""
    from benchmarks.frame_experiments.length_scaling import SHAPE, make_data

    path = folder / "sessions.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_data(length_plan(options), SHAPE, options["repo"]).save(path)
        print(f"wrote {path}", flush=True)
    return path


def stored(path: Path, make: Callable[..., Piece], *words: Any) -> Piece:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(make(*words)).encode())
        print(f"{path.stem} is done", flush=True)
    piece: Piece = json.loads(path.read_text())
    return piece


def critical(options: dict[str, Any], pool: ProcessPoolExecutor) -> Piece:
    from benchmarks.frame_experiments.sequence_models import MODELS
    from benchmarks.frame_experiments.tracking import TASKS

    def path(task: str, model: str) -> Path:
        steps = critical_plan(task, options).steps
        return Path(options["pieces"]) / f"critical-{task}-{steps}-{options['seed']}" / f"{model}.json"

    jobs = {
        (task, model): pool.submit(stored, path(task, model), critical_piece, task, model, options)
        for task in TASKS
        for model in MODELS
    }
    found = {key: job.result() for key, job in jobs.items()}
    tasks: dict[str, Piece] = {}
    for task, rule in TASKS.items():
        rows = {model: found[task, model] for model in MODELS}
        tasks[task] = {
            "floor": round(rule.floor(), 4),
            "accuracy_64": {model: row["accuracy"][-1] for model, row in rows.items()},
            "accuracy_256": {model: row["accuracy_unseen"][-1] for model, row in rows.items()},
            "critical_length": {model: row["critical_length"] for model, row in rows.items()},
            "parameters": {model: row["parameters"] for model, row in rows.items()},
            "by_position": {model: row["accuracy_unseen"] for model, row in rows.items()},
            "steps": critical_plan(task, options).steps,
        }
    shell = tasks["shell"]
    return {
        "lstm_accuracy_64": shell["accuracy_64"]["lstm"],
        "lstm_accuracy_256": shell["accuracy_256"]["lstm"],
        "critical_length": {model: length for model, length in shell["critical_length"].items() if model != "lstm"},
        "tasks": tasks,
    }


def length(options: dict[str, Any], pool: ProcessPoolExecutor) -> Piece:
    from benchmarks.frame_experiments.length_summary import summarise

    source = f"commits of {options['repo'].resolve().name}" if options["repo"] else "repairs"
    folder = options["pieces"] / length_folder(options)
    options = options | {"data": length_data(folder, options)}
    runs = [(length, 8) for length in LENGTHS[::-1]] + [CONTROL]  # the longest first, so that no core waits for it
    jobs = [pool.submit(stored, folder / f"L{a}-B{b}.json", length_piece, a, b, options) for a, b in runs]
    pieces = {run: job.result() for run, job in zip(runs, jobs, strict=True)}
    rows = [pieces[length, 8] for length in LENGTHS]
    return {**summarise(rows, pieces[CONTROL], options["steps"]), "source": source}


def swarm(options: dict[str, Any], pool: ProcessPoolExecutor) -> Piece:
    """The same as `make recurrence`, whose settings have their own number of steps."""
    done = subprocess.run([sys.executable, "examples/recurrence/run.py"], cwd=ROOT, check=False, stdout=subprocess.PIPE)
    found: Piece = json.loads(done.stdout.decode().splitlines()[-1])
    return {**found, "exit_code": done.returncode}


PARTS = {"critical": critical, "length": length, "swarm": swarm}
DEFAULT_STEPS = {"critical": 0, "length": 800, "swarm": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS, help="one part; without it, all")
    parser.add_argument("--steps", type=positive, help="training steps per model; each part has its own number")
    parser.add_argument(
        "--least-s",
        type=float,
        default=60.0,
        help="CPU seconds that a run of `length` has at least; twice as many from 32 on",
    )
    parser.add_argument("--repo", type=Path, help="a git repository whose commits are the sessions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=positive, default=2)
    parser.add_argument("--pictures", type=Path, help="a directory for the plots")
    parser.add_argument("--pieces", type=Path, default=ROOT / "runs" / "recurrence")
    options = vars(parser.parse_args())
    try:
        print(json.dumps(measure(options)))
    except ShoalError as error:
        raise SystemExit(f"recurrence.py: {error}") from None


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return int(text)


def measure(options: dict[str, Any]) -> Piece:
    results: Piece = {"benchmark": "recurrence", "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    for part in [options["part"]] if options["part"] else PARTS:
        steps = options["steps"] or DEFAULT_STEPS[part]
        with ProcessPoolExecutor(options["processes"]) as pool:
            results[part] = PARTS[part]({**options, "steps": steps}, pool)
        if options["pictures"] is not None:
            from benchmarks.frame_experiments.pictures import DRAW

            DRAW[part](results[part], options["pictures"] / f"recurrence_{part}.png")
    return results


if __name__ == "__main__":
    main()
