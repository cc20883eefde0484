"""Is the simulator right, does it explain INTELLECT-2, and does it scale?

    python benchmarks/simulate.py [--parts scale explain real] [--pieces DIR] [--plots docs/images] [--steps 100]

`real`: three swarms of real processes (fast, slow and unequal workers of the bundled policy) whose engines and trainers keep to
stated times per token and per step, so that two cores do not decide. Each run is measured as `shoal simulate RUN` measures one, and
simulated. `prediction_error_max` is the largest relative error of steps per minute and mean age; `share_error_max` the largest
absolute error of the shares of time in which the trainer and the workers wait. The first 8 steps do not count.

`explain`: INTELLECT-2's published numbers against the scenario `intellect-2`, for SHORT and LONG targets, with 3 free parameters.
Then the same swarm with each of deltas, continuous engines, leases in time and backups, and with all of them.

`scale`: `seconds_10k` is the processor time of the scenario `ten-thousand-laptops`, 100 steps, in one process. Then swarms of 100,
1,000 and 10,000 workers whose batches grow with them: with enough of everything, and with one thing fixed at a time.

With --pieces every finished piece is kept there, and a further run of the same code begins where the last one ended.
"""

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from shoal.config import ShoalConfig, build_config, to_toml
from shoal.files import digest_bytes, write_atomic
from shoal.rundir import RunDirectory
from shoal.simulation.swarm import SwarmResult, SwarmSpec, load_scenario, run_swarm
from shoal.simulation.swarm.spec import build_scenario

ROOT = Path(__file__).resolve().parent.parent
CODE = ("src/shoal/coordinator/rules", "src/shoal/simulation", "benchmarks/simulate.py")
PARTS = ("scale", "explain", "real")
SIZES = (100, 1_000, 10_000)
WARM_UP_STEPS = 8
ROWS = 8
REAL: dict[str, dict[str, Any]] = {
    "fast": {"token_s": (0.04, 0.04, 0.04), "pause_s": 9.0},
    "slow": {"token_s": (0.07, 0.07), "pause_s": 0.5},
    "unequal": {"token_s": (0.04, 0.08, 0.2), "pause_s": 3.0},
}
"""Seconds per token of each worker's rows, and the trainer's pause after every update."""


class Pieces:
    """Results by name, on disk if there is a directory; those of other code are not used."""

    def __init__(self, directory: Path | None) -> None:
        files = sorted(file for place in CODE for file in [ROOT / place, *(ROOT / place).rglob("*")] if file.is_file())
        code = digest_bytes(b"".join(file.read_bytes() for file in files if file.suffix in (".py", ".toml")))[:16]
        self.directory = None if directory is None else directory / code

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        path = None if self.directory is None else self.directory / f"{name.replace(' ', '-').replace('/', '-')}.json"
        if path is not None and path.exists():
            return json.loads(path.read_text())
        result = make()
        print(json.dumps({name: result})[:400], file=sys.stderr, flush=True)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(result).encode())
        return result


def changed(spec: SwarmSpec, **sections: dict[str, Any]) -> SwarmSpec:
    """The scenario with other values; `settings` are merged section by section, `workers` changes every class."""
    tree = spec.model_dump(mode="json")
    for name, values in sections.items():
        if name == "settings":
            for part, settings in values.items():
                tree["settings"][part] = tree["settings"].get(part, {}) | settings
        elif name in ("workers", "relays"):
            tree[name] = [one | values for one in tree[name]]
        else:
            tree[name] |= values
    return build_scenario(tree)


def brief(result: SwarmResult) -> dict[str, Any]:
    """Without what only a plot of one swarm needs."""
    return {name: value for name, value in result.to_json().items() if name not in ("formed_s", "groups")}


def simulated(spec: SwarmSpec) -> dict[str, Any]:
    return brief(run_swarm(spec))


# Scale


def ten_thousand(steps: int) -> dict[str, Any]:
    spec = changed(load_scenario("ten-thousand-laptops"), run={"steps": steps})
    began, wall = time.process_time(), time.monotonic()
    result = run_swarm(spec)
    seconds = {"seconds": time.process_time() - began, "wall_s": time.monotonic() - wall}
    return brief(result) | seconds


ENOUGH: dict[str, dict[str, Any]] = {
    "coordinator": {"requests_per_s": 0},
    "origin": {"up_mbit_s": 1e6},
    "relays": {"up_mbit_s": 1e6},
    "validators": {"count": 2000},
}
FIXED: dict[str, dict[str, Any]] = {
    "enough of everything": {},
    "one coordinator, heartbeats every 5 s": {"coordinator": {"requests_per_s": 1719}},
    "origin of 1 Gbit/s, no relay": {"origin": {"up_mbit_s": 1000}},
    "4 relays of 1 Gbit/s": {"relays": {"count": 4, "up_mbit_s": 1000}},
    "4 validators": {"validators": {"count": 4}},
}


def scaled(name: str, size: int, steps: int) -> SwarmSpec:
    """Honest laptops without churn, with a batch and a trainer that grow with them, and full weights already there."""
    spec, fixed = load_scenario("ten-thousand-laptops"), FIXED[name]
    tree = spec.model_dump(mode="json")
    tree["workers"] = [tree["workers"][0] | {"count": size, "stays_s": 0}]
    tree["weights"] |= {"full_bytes": tree["weights"]["delta_bytes"]}
    tree["run"] |= {"steps": steps, "name": f"{name}, {size} workers"}
    tree["settings"]["training"]["groups_per_step"] = max(4, size * 2048 // 10_000)
    tree["settings"]["coordinator"]["gone_after_s"] = 30
    if "no relay" in name:
        tree["relays"] = []
    return changed(build_scenario(tree), **(ENOUGH | fixed))


def scale(steps: int, short: int, pieces: Pieces, plots: Path | None) -> dict[str, Any]:
    whole = pieces.get(f"10k {steps}", lambda: ten_thousand(steps))
    curves: dict[str, dict[int, Any]] = {}
    for name in FIXED:
        for size in SIZES:
            found = pieces.get(f"{name} {size} {short}", partial(simulated, scaled(name, size, short)))
            curves.setdefault(name, {})[size] = found
    if plots is not None:
        draw_scale(curves, plots / "simulate_scale.svg")
    return {
        "seconds_10k": round(whole["seconds"], 1),
        "wall_s_10k": round(whole["wall_s"], 1),
        "ten_thousand": {name: whole[name] for name in SHOWN},
        "step_s_by_size": {
            name: {str(size): round(one["step_s"], 1) for size, one in of.items()} for name, of in curves.items()
        },
        "limits": limits(curves["enough of everything"][SIZES[-1]]),
    }


SHOWN = (
    *("step_s", "mean_age", "trainer_wait", "workers_wait", "validators_busy", "audited_share", "coordinator_load"),
    *("requests_per_s", "arrival_s", "first_step_s", "banned", "hostile", "ban_after_s", "hostile_trained", "fates"),
    *("mbytes_per_step", "needs", "sentence", "advice"),
)


def limits(free: dict[str, Any]) -> dict[str, int]:
    """Workers at which one of each is busy all the time, if work and traffic grow with the workers."""
    size, step_s = SIZES[-1], free["step_s"]
    loads = {
        "one coordinator process (1,719 requests/s)": free["requests_per_s"] / 1719,
        "an origin of 1 Gbit/s without relays": free["mbytes_per_step"]["relays_up"] * 8 / step_s / 1000,
        "one relay of 1 Gbit/s": free["mbytes_per_step"]["relays_up"] * 8 / step_s / 1000,
        "one validator": free["validators_busy"] * ENOUGH["validators"]["count"],
    }
    return {name: round(size / load) for name, load in loads.items() if load > 0}


def draw_scale(curves: dict[str, dict[int, Any]], path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "scale", "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, 4.2), layout="constrained")
        axes = figure.subplots()
        for name, of in curves.items():
            axes.plot(list(of), [one["step_s"] for one in of.values()], marker="o", label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("workers; the batch grows with them")
        axes.set_ylabel("seconds per step")
        axes.grid(alpha=0.2, which="both")
        axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


# INTELLECT-2

PUBLISHED = {
    "broadcast_min": (14.0, 14.0, "from 62 GB and 590 Mbit/s"),
    "first_file_min": (10.0, 10.0, "free parameter: speed of a row, from SHORT"),
    "verified_batch_min": (22.0, 29.0, "free parameters: number of nodes, in SHORT and in LONG"),
}
"""SHORT, LONG, and where the simulated one comes from."""
LONG: dict[str, dict[str, Any]] = {
    "settings": {"rollouts": {"max_new_tokens": 16_000}},
    "work": {"median_tokens": 5300.0},
    "trainer": {"step_s": 1260.0},
    "workers": {"count": 26},
}
"""Targets of 2,000 to 10,000 tokens; nodes came and went, so their number is free again."""
WORTH: dict[str, dict[str, Any]] = {
    "as it was run": {},
    "with deltas": {"weights": {"delta_bytes": 6.2e10 / 304, "keyframe_every": 8}},
    "with continuous engines": {"workers": {"continuous": True}},
    "with leases in time": {"settings": {"coordinator": {"just_in_time": True}}},
    "with backup leases": {"coordinator": {"backups": True}},
}


def explain(steps: int, pieces: Pieces, plots: Path | None) -> dict[str, Any]:
    spec = changed(load_scenario("intellect-2"), run={"steps": steps})
    everything: dict[str, Any] = {name: values for change in WORTH.values() for name, values in change.items()}
    runs = {name: spec_of(spec, change) for name, change in WORTH.items()}
    runs |= {"with all four": spec_of(spec, everything), "LONG": spec_of(spec, LONG)}
    found = {name: pieces.get(f"intellect {name} {steps}", partial(simulated, one)) for name, one in runs.items()}
    if plots is not None:
        draw_worth({name: one for name, one in found.items() if name != "LONG"}, plots / "simulate_intellect2.svg")
    short, long = minutes(found["as it was run"]), minutes(found["LONG"])
    return {
        "intellect2": {
            name: {"published": [a, b], "simulated": [short[name], long[name]], "from": why}
            for name, (a, b, why) in PUBLISHED.items()
        },
        "free_parameters": 3,
        "worth": {name: worth(one) for name, one in found.items() if name != "LONG"},
    }


def spec_of(spec: SwarmSpec, change: dict[str, Any]) -> SwarmSpec:
    return changed(spec, **change)


def minutes(result: dict[str, Any]) -> dict[str, float]:
    names = {"broadcast_min": "arrival_s", "first_file_min": "first_file_s", "verified_batch_min": "batch_s"}
    return {name: round(result[field] / 60, 1) for name, field in names.items()}


def worth(result: dict[str, Any]) -> dict[str, Any]:
    return {
        "step_min": round(result["step_s"] / 60, 2),
        "mean_age": round(result["mean_age"], 2),
        "trainer_wait": round(result["trainer_wait"], 3),
        "workers_wait": round(result["workers_wait"], 3),
        "batch_min": round(result["batch_s"] / 60, 1),
        "broadcast_min": round(result["arrival_s"] / 60, 2),
        "nodes_needed": result["needs"]["workers"],
        "surplus": round(result["fates"]["surplus"], 3),
    }


def draw_worth(found: dict[str, Any], path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    fields = {"batch_min": "minutes to a verified batch", "mean_age": "mean age", "nodes_needed": "nodes needed"}
    values = {name: worth(one) for name, one in found.items()}
    with matplotlib.rc_context({"svg.hashsalt": "worth", "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10, 2.8), layout="constrained")
        for number, (axes, (field, title)) in enumerate(zip(figure.subplots(1, 3), fields.items(), strict=True)):
            axes.barh(list(values), [one[field] or 0 for one in values.values()], color="#4c8df6")
            axes.invert_yaxis()
            axes.set_xlabel(title)
            if number:
                axes.set_yticklabels([])
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


# Real swarms


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
    Worker._measure = lambda worker: (ROWS, ROWS / token_s)  # type: ignore[method-assign, assignment]
    role.work(url, print, root=root, key_file=None, run_key=None, name=root.name, threads=1)


def run_real(name: str, steps: int) -> dict[str, Any]:
    """One real swarm: what it did, and what is predicted from its measured speeds."""
    from shoal.simulation.swarm.trial import measure

    overlap = importlib.import_module("overlap")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with real_swarm(root, name, steps) as processes:
            overlap.wait_until_finished(root, processes, steps)
        seen = observed(root, steps)
        tree = measure(RunDirectory(root / "run"), 80)
    predicted = run_swarm(build_scenario(tree))
    return {"observed": seen, "predicted": {field: getattr(predicted, field) for field in seen}, "scenario": tree}


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


def real(steps: int, pieces: Pieces) -> dict[str, Any]:
    found = {name: pieces.get(f"real {name} {steps}", partial(run_real, name, steps)) for name in REAL}
    relative, absolute = {}, {}
    for name, one in found.items():
        seen, predicted = one["observed"], one["predicted"]
        for field in ("steps_per_minute", "mean_age"):
            relative[f"{name} {field}"] = (
                abs(predicted[field] / seen[field] - 1) if seen[field] else abs(predicted[field])
            )
        for field in ("trainer_wait", "workers_wait"):
            absolute[f"{name} {field}"] = abs(predicted[field] - seen[field])
    return {
        "prediction_error_max": round(max(relative.values()), 4),
        "share_error_max": round(max(absolute.values()), 4),
        "prediction_errors": {name: round(value, 4) for name, value in relative.items()},
        "share_errors": {name: round(value, 4) for name, value in absolute.items()},
        "real": {name: {side: one[side] for side in ("observed", "predicted")} for name, one in found.items()},
        "real_steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=int, default=100, help="of the swarm of ten thousand")
    parser.add_argument("--short-steps", type=int, default=12, help="of the swarms of growing size")
    parser.add_argument("--intellect-steps", type=int, default=40)
    parser.add_argument("--real-steps", type=int, default=28)
    parser.add_argument("--pieces", type=Path, help="directory for finished pieces, to resume from")
    parser.add_argument("--plots", type=Path, help="directory for the plots")
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
        return
    if options.worker:
        worker_child(options.worker, options.dir, options.token_s)
        return
    pieces, result = Pieces(options.pieces), dict[str, Any]()
    if "explain" in options.parts:
        result |= explain(options.intellect_steps, pieces, options.plots)
    if "scale" in options.parts:
        result |= scale(options.steps, options.short_steps, pieces, options.plots)
    if "real" in options.parts:
        result |= real(options.real_steps, pieces)
    print(json.dumps({"benchmark": "simulate", **result, "machine": f"{platform.machine()}, {os.cpu_count()} cores"}))


if __name__ == "__main__":
    main()
