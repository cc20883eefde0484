"""Three swarms of real processes, and what is predicted from their measured speeds: the part `real` of simulate.py.

    python benchmarks/real_swarms.py [--swarms fast slow unequal] [--steps 44] [--runs DIR]

Workers of the bundled policy whose engines keep to a stated time per token, and a trainer that pauses in every step, so that two
cores do not decide. With --runs the directories of the swarms are kept there, and a swarm that is there is not started again.
"""

import argparse
import importlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from shoal.config import ShoalConfig, build_config, to_toml
from shoal.rundir import RunDirectory
from shoal.simulation.swarm import run_swarm
from shoal.simulation.swarm.spec import build_scenario

WARM_UP_STEPS = 8
ROWS = 8
REAL: dict[str, dict[str, Any]] = {
    "fast": {"token_s": (0.04, 0.04, 0.04), "pause_s": 9.0},
    "slow": {"token_s": (0.07, 0.07), "pause_s": 0.5},
    "unequal": {"token_s": (0.04, 0.08, 0.2), "pause_s": 3.0},
}
"""Seconds per token of each worker's rows, and the trainer's pause after every update."""
TRIAL = "slow"
"""The other swarms are also predicted from what this one showed, with their own speeds put in (`transfer_*`)."""
FIELDS = ("steps_per_minute", "mean_age", "trainer_wait", "workers_wait")


def real_config(root: Path, steps: int, ports: Sequence[int]) -> ShoalConfig:
    overlap = importlib.import_module("overlap")
    tree: dict[str, Any] = overlap.make_config(root, 2, steps, 8, list(ports)).model_dump()
    tree["rollouts"] |= {"tasks_per_slot": 2, "max_new_tokens": 32}
    return build_config(tree)


@contextmanager
def real_swarm(root: Path, name: str, steps: int) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    broadcast = importlib.import_module("broadcast")
    ports = [broadcast.free_port() for _ in range(3)]
    config, run_file, plan = real_config(root, steps, ports), root / "run.toml", REAL[name]
    run_file.write_text(to_toml(config))
    relay_url, url = f"http://127.0.0.1:{ports[2]}", config.coordinator_url
    shoal, here = [sys.executable, "-m", "shoal"], [sys.executable, __file__]
    relay = ["relay", "--upstream", config.origin_url, "--port", str(ports[2]), "--dir", str(root / "relay")]
    commands = {
        "init": [*shoal, "init", str(run_file)],
        "coordinator": [*shoal, "coordinator", str(run_file)],
        "train": [*here, "--trainer", str(root / "run"), "--pause", str(plan["pause_s"])],
        "relay": [*shoal, *relay, "--coordinator", url, "--public-url", relay_url],
        "validate": [*shoal, "validate", str(run_file), "--threads", "1"],
    }
    for number, token_s in enumerate(plan["token_s"]):
        worker = root / f"worker-{number}"
        commands[worker.name] = [*here, "--worker", url, "--dir", str(worker), "--token-s", str(token_s)]
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for role, command in commands.items():
            log = (root / f"{role}.log").open("wb")
            started[role] = subprocess.Popen(command, stdout=log, stderr=log)
            if role == "init" and started[role].wait(timeout=300):
                raise SystemExit((root / "init.log").read_text())
        yield started
    finally:
        for process in reversed(started.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in started.values():
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def train_child(directory: Path, pause_s: float) -> None:
    """In the child: the trainer's role, with a pause after every update."""
    importlib.import_module("freshness").train(directory, pause_s)


def worker_child(url: str, root: Path, token_s: float) -> None:
    """In the child: a worker whose engine takes a given time for a token, in a given number of rows."""
    from shoal.roles import worker as role
    from shoal.worker import Worker
    from shoal.worker.registration import Registration

    class Paced:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __getattr__(self, name: str) -> Any:
            return getattr(self.stream, name)

        def step(self) -> Any:
            began = time.monotonic()
            ended = self.stream.step()
            time.sleep(max(0.0, token_s - (time.monotonic() - began)))
            return ended

    work = Worker._work

    def paced(worker: Worker, stream: Any) -> None:
        work(worker, Paced(stream))  # type: ignore[arg-type]  # has everything of a stream

    Worker._work = paced  # type: ignore[method-assign, assignment]
    Registration._measure = lambda registration: (ROWS, ROWS / token_s)  # type: ignore[method-assign, assignment]
    role.work(url, print, root=root, key_file=None, run_key=None, name=root.name, threads=1)


def run_real(name: str, steps: int, kept: Path | None) -> dict[str, Any]:
    """One real swarm: what it did, and what is predicted from its measured speeds."""
    from shoal.simulation.swarm.trial import measure

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) if kept is None else kept / f"{name}-{steps}"
        finished = root / "finished"
        if not finished.exists():
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
            finish_real(root, name, steps)
            finished.touch()
        seen, tree = observed(root, steps), measure(RunDirectory(root / "run"), 80)
    return {"observed": seen, "predicted": predict(tree), "scenario": tree}


def finish_real(root: Path, name: str, steps: int) -> None:
    with real_swarm(root, name, steps) as processes:
        importlib.import_module("overlap").wait_until_finished(root, processes, steps)


def observed(root: Path, steps: int) -> dict[str, float]:
    overlap = importlib.import_module("overlap")
    lines = [json.loads(line) for line in (root / "run/trainer/steps.jsonl").read_text().splitlines()]
    published = {
        event["version"]: event["at"] for event in overlap.events(root / "run/events/trainer.jsonl", "published")
    }
    begin, end = published[WARM_UP_STEPS], published[steps]
    counted = [line for line in lines if line["step"] >= WARM_UP_STEPS]
    ages = [(int(age), int(n)) for line in counted for age, n in line["age_histogram"].items()]
    waits = [
        sum(event["seconds"] for event in overlap.events(path, "waited") if begin < event["at"] <= end) / (end - begin)
        for path in sorted(root.glob("worker-*/events.jsonl"))
    ]
    return {
        "steps_per_minute": 60 * (steps - WARM_UP_STEPS) / (end - begin),
        "mean_age": sum(age * n for age, n in ages) / sum(n for _, n in ages),
        "trainer_wait": sum(line["time_wait_batch_s"] for line in counted) / (end - begin),
        "workers_wait": fmean(waits),
    }


def real(steps: int, names: Sequence[str], kept: Path | None) -> dict[str, Any]:
    found = {name: run_real(name, steps, kept) for name in names}
    result = errors({name: (one["observed"], one["predicted"]) for name, one in found.items()})
    if TRIAL in found:
        others = {name: predict(edited(found[TRIAL]["scenario"], name)) for name in found if name != TRIAL}
        moved = errors({name: (found[name]["observed"], one) for name, one in others.items()}) if others else {}
        result |= {f"transfer_{field}": value for field, value in moved.items()}
    return result | {"real": found, "real_steps": steps}


def errors(pairs: dict[str, tuple[dict[str, float], dict[str, float]]]) -> dict[str, Any]:
    """Relative errors of speed and age, absolute ones of shares; each pair is what was observed and what was predicted."""
    relative, absolute = {}, {}
    for name, (seen, predicted) in pairs.items():
        for field in ("steps_per_minute", "mean_age"):
            relative[f"{name} {field}"] = round(abs(predicted[field] / seen[field] - 1), 4)
        for field in ("trainer_wait", "workers_wait"):
            absolute[f"{name} {field}"] = round(abs(predicted[field] - seen[field]), 4)
    return {
        "prediction_error_max": max(relative.values()),
        "share_error_max": max(absolute.values()),
        "prediction_errors": relative,
        "share_errors": absolute,
    }


def predict(tree: dict[str, Any]) -> dict[str, float]:
    result = run_swarm(build_scenario(tree))
    return {field: getattr(result, field) for field in FIELDS}


def edited(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """The trial with the workers and the trainer of another swarm, as an owner would edit it."""
    before, after, like = REAL[TRIAL], REAL[name], tree["workers"][0]
    speeds = [ROWS / token_s for token_s in after["token_s"]]
    workers = [
        like | {"name": f"worker-{number}", "tokens_per_s": speed, "rows": ROWS} for number, speed in enumerate(speeds)
    ]
    step_s = tree["trainer"]["step_s"] - before["pause_s"] + after["pause_s"]
    return tree | {"workers": workers, "trainer": tree["trainer"] | {"step_s": step_s}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swarms", nargs="+", choices=list(REAL), default=list(REAL))
    parser.add_argument("--steps", type=int, default=44)
    parser.add_argument("--runs", type=Path, help="directory in which the swarms are kept")
    for flag, kind in (
        ("--trainer", Path),
        ("--pause", float),
        ("--worker", str),
        ("--dir", Path),
        ("--token-s", float),
    ):
        parser.add_argument(flag, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        train_child(options.trainer, options.pause)
    elif options.worker:
        worker_child(options.worker, options.dir, options.token_s)
    else:
        print(json.dumps({"benchmark": "real_swarms", **real(options.steps, options.swarms, options.runs)}))


if __name__ == "__main__":
    main()
