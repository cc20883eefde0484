"""Is the simulator right, does it explain INTELLECT-2, and does it scale?

    python benchmarks/simulate.py [--parts scale explain real] [--pieces DIR] [--runs DIR] [--plots docs/images]

`real`: three swarms of real processes (real_swarms.py: fast, slow, unequal workers). Each run is measured as `shoal simulate RUN`
measures one, and simulated. `prediction_error_max` is the largest relative error of steps per minute and mean age;
`share_error_max` the largest absolute error of the shares of time in which the trainer and the workers wait. The first 8 steps do
not count.

`explain`: INTELLECT-2's published numbers against the scenario `intellect-2`, for SHORT and LONG targets, with 3 free parameters.
Then both with each of deltas, continuous engines, leases in time and backups, with all of them, and SHORT with slow nodes and with
too many nodes.

`scale`: `seconds_10k` is the processor time of the scenario `ten-thousand-laptops`, 100 steps, in one process. Then swarms of 100,
1,000 and 10,000 workers whose batches grow with them: with enough of everything, and with one thing fixed at a time.

With --pieces every simulated swarm is kept there and with --runs every real one, and a further run begins where the last one ended.
"""

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from shoal.files import digest_bytes, write_atomic
from shoal.simulation.swarm import SwarmSpec, load_scenario, run_swarm
from shoal.simulation.swarm.spec import build_scenario

ROOT = Path(__file__).resolve().parent.parent
CODE = ("src/shoal/coordinator/rules", "src/shoal/simulation")
OF_TRIALS = ("trial.py", "engines.py")
"""Only what is measured from a run depends on these."""
PARTS = ("scale", "explain", "real")
SIZES = (100, 1_000, 10_000)


class Pieces:
    """Simulated swarms, on disk if there is a directory; those of other code or another scenario are not used."""

    def __init__(self, directory: Path | None, processes: int = 1) -> None:
        files = sorted(file for place in CODE for file in (ROOT / place).rglob("*.py") if file.name not in OF_TRIALS)
        self.code = digest_bytes(b"".join(file.read_bytes() for file in files))
        self.directory, self.processes = directory, processes

    def get_all(self, specs: Sequence[SwarmSpec]) -> list[dict[str, Any]]:
        """What came of each swarm, with the processor time of its simulation; the first ones begin first."""
        with ProcessPoolExecutor(self.processes) as pool:
            return list(pool.map(self.get, specs))

    def get(self, spec: SwarmSpec) -> dict[str, Any]:
        name = digest_bytes(f"{self.code} {spec.model_dump_json()}".encode())[:24]
        path = None if self.directory is None else self.directory / f"{name}.json"
        if path is not None and path.exists():
            return dict(json.loads(path.read_text()))
        result = simulated(spec)
        print(
            json.dumps({spec.run.name: result["step_s"], "seconds": round(result["seconds"], 1)}),
            file=sys.stderr,
            flush=True,
        )
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


def simulated(spec: SwarmSpec) -> dict[str, Any]:
    """Without what only a plot of one swarm needs; `seconds` is processor time."""
    began, wall = time.process_time(), time.monotonic()
    shown = 0

    def show(share: float) -> None:
        nonlocal shown
        if int(10 * share) > shown:
            shown = int(10 * share)
            seconds = round(time.process_time() - began, 1)
            print(json.dumps({spec.run.name: share, "seconds_so_far": seconds}), file=sys.stderr, flush=True)

    result = run_swarm(spec, show).to_json()
    took = {"seconds": time.process_time() - began, "wall_s": time.monotonic() - wall}
    return {name: value for name, value in result.items() if name not in ("formed_s", "groups")} | took


# Scale


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
    tree["settings"]["trust"]["probation_audits"] = 1  # so that a few steps reach the audits of a run that goes on
    if "no relay" in name:
        tree["relays"] = []
    return changed(build_scenario(tree), **(ENOUGH | fixed))


def scale(steps: int, short: int, pieces: Pieces, plots: Path | None) -> dict[str, Any]:
    laptops = changed(load_scenario("ten-thousand-laptops"), run={"steps": steps})
    whole, *others = pieces.get_all([laptops, *(scaled(name, size, short) for name in FIXED for size in SIZES)])
    found = iter(others)
    curves = {name: {size: next(found) for size in SIZES} for name in FIXED}
    if plots is not None:
        draw_scale(curves, plots / "simulate_scale.svg")
    return {
        "seconds_10k": round(whole["seconds"], 1),
        "wall_s_10k": round(whole["wall_s"], 1),
        "ten_thousand": {name: whole[name] for name in SHOWN},
        "step_s_by_size": {
            name: {str(size): _rounded(one["step_s"]) for size, one in of.items()} for name, of in curves.items()
        },
        "limits": limits(curves["enough of everything"][SIZES[-1]]),
        "limits_audited_share": round(curves["enough of everything"][SIZES[-1]]["audited_share"], 3),
    }


def _rounded(step_s: float | None) -> float | None:
    """None: the swarm made no progress."""
    return None if step_s is None else round(step_s, 1)


SHOWN = (
    *("step_s", "mean_age", "trainer_wait", "workers_wait", "validators_busy", "audited_share", "coordinator_load"),
    *("requests_per_s", "arrival_s", "first_step_s", "banned", "hostile", "ban_after_s", "hostile_trained", "fates"),
    *("mbytes_per_step", "needs", "sentence", "advice"),
)


def limits(free: dict[str, Any]) -> dict[str, int]:
    """Workers at which one of each is busy all the time, if work and traffic grow with the workers."""
    size, step_s = SIZES[-1], free["step_s"]
    fetched_gbit_s = size * free["mbytes_per_step"]["worker_down"] * 8e-3 / step_s
    loads = {
        "one coordinator process (1,719 requests/s)": free["requests_per_s"] / 1719,
        "an origin or relay of 1 Gbit/s": fetched_gbit_s,
        "one validator": free["validators_busy"] * ENOUGH["validators"]["count"],
    }
    return {name: round(size / load) for name, load in loads.items() if load > 0}


def draw_scale(curves: dict[str, dict[int, Any]], path: Path) -> None:
    """Time per step by the number of workers, and the number at which one of each part is busy all the time."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "scale", "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(12, 4), layout="constrained")
        steps, ends = figure.subplots(1, 2)
        for name, of in curves.items():
            ended = {size: one["step_s"] for size, one in of.items() if one["step_s"] is not None}
            steps.plot(list(ended), list(ended.values()), marker="o", label=name)
        steps.set_xscale("log")
        steps.set_yscale("log")
        steps.set_xlabel("workers; the batch grows with them")
        steps.set_ylabel("seconds per step")
        steps.grid(alpha=0.2, which="both")
        steps.legend(frameon=False, fontsize="small")
        found = limits(curves["enough of everything"][SIZES[-1]])
        ends.bar_label(ends.barh(list(found), list(found.values()), color="#4c8df6"), fmt="{:,.0f}", padding=3)
        ends.set_xscale("log")
        ends.set_xlabel("workers at which it is busy all the time")
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
    "workers": {"count": 28},
}
"""Targets of 2,000 to 10,000 tokens; nodes came and went, so their number is free again."""
WORTH: dict[str, dict[str, Any]] = {
    "as it was run": {},
    "with deltas": {"weights": {"delta_bytes": 6.2e10 / 304, "keyframe_every": 8}},
    "with continuous engines": {
        "workers": {"continuous": True},
        "settings": {"rollouts": {"tasks_per_slot": 1}},
        "validators": {"file_s": 5 / 16},
    },
    "with leases in time": {"settings": {"coordinator": {"just_in_time": True}}},
    "with backup leases": {"coordinator": {"backups": True}},
}
"""Continuous engines let a slot be one group without idle rows, so they come with small slots and small files."""


OTHERS: dict[str, dict[str, Any]] = {
    "2 slow nodes": {},
    "2 slow nodes, backup leases": {"coordinator": {"backups": True}},
    "twice the nodes, deltas": {"workers": {"count": 28}, "weights": WORTH["with deltas"]["weights"]},
    "twice the nodes, deltas, leases in time": {
        "workers": {"count": 28},
        "weights": WORTH["with deltas"]["weights"],
        "settings": {"coordinator": {"just_in_time": True}},
    },
}
"""SHORT where backups and leases in time could matter: two nodes have a third of the speed, or nodes wait for the trainer."""


def explain(steps: int, pieces: Pieces, plots: Path | None) -> dict[str, Any]:
    found = dict(zip(specs := explained(steps), pieces.get_all(list(specs.values())), strict=True))
    table = {of: {name: worth(one) for (which, name), one in found.items() if which == of} for of, _ in specs}
    if plots is not None:
        draw_worth({of: table[of] for of in ("SHORT", "LONG")}, plots / "simulate_intellect2.svg")
    both = [minutes(found[of, "as it was run"]) for of in ("SHORT", "LONG")]
    return {
        "intellect2": {
            name: {"published": [a, b], "simulated": [one[name] for one in both], "from": why}
            for name, (a, b, why) in PUBLISHED.items()
        },
        "free_parameters": 3,
        "worth": table,
    }


def explained(steps: int) -> dict[tuple[str, str], SwarmSpec]:
    short = changed(load_scenario("intellect-2"), run={"steps": steps})
    long, slow = changed(short, **LONG), with_slow_nodes(short)
    changes = WORTH | {"with all four": merged(WORTH.values())}
    return {
        **{("SHORT", name): changed(short, **change) for name, change in changes.items()},
        **{("LONG", name): changed(long, **change) for name, change in changes.items()},
        **{("others", name): changed(slow if "slow" in name else short, **change) for name, change in OTHERS.items()},
    }


def merged(changes: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """All changes at once."""
    found: dict[str, Any] = {}
    for name, values in (part for change in changes for part in change.items()):
        both = isinstance(found.get(name), dict) and isinstance(values, dict)
        found[name] = merged([found[name], values]) if both else values
    return found


def with_slow_nodes(spec: SwarmSpec) -> SwarmSpec:
    tree = spec.model_dump(mode="json")
    (nodes,) = tree["workers"]
    slow = nodes | {"name": "slow node", "count": 2, "tokens_per_s": nodes["tokens_per_s"] / 3}
    tree["workers"] = [nodes | {"count": nodes["count"] - 2}, slow]
    return build_scenario(tree)


def minutes(result: dict[str, Any]) -> dict[str, float]:
    names = {"broadcast_min": "arrival_s", "first_file_min": "first_file_s", "verified_batch_min": "batch_s"}
    return {name: round(result[field] / 60, 1) for name, field in names.items()}


def worth(result: dict[str, Any]) -> dict[str, Any]:
    if not result["is_finished"]:
        return {"stopped": result["stopped"]}
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


def draw_worth(table: dict[str, dict[str, Any]], path: Path) -> None:
    """A row for SHORT and one for LONG: step, batch, age, and the nodes that the trainer needs."""
    import matplotlib
    from matplotlib.figure import Figure

    fields = {
        "step_min": "minutes per step",
        "batch_min": "minutes to a verified batch",
        "mean_age": "mean age of groups",
        "nodes_needed": "nodes needed",
    }
    with matplotlib.rc_context({"svg.hashsalt": "worth", "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(12, 2.4 * len(table)), layout="constrained")
        for row, (of, values) in zip(
            figure.subplots(len(table), len(fields), squeeze=False), table.items(), strict=True
        ):
            for number, (axes, (field, title)) in enumerate(zip(row, fields.items(), strict=True)):
                axes.barh(list(values), [one.get(field) or 0 for one in values.values()], color="#4c8df6")
                axes.invert_yaxis()
                axes.set_xlabel(title)
                if number:
                    axes.set_yticklabels([])
                else:
                    axes.set_title(of, loc="left", fontsize="medium")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=int, default=100, help="of the swarm of ten thousand")
    parser.add_argument("--short-steps", type=int, default=8, help="of the swarms of growing size")
    parser.add_argument("--intellect-steps", type=int, default=24)
    parser.add_argument("--real-steps", type=int, default=44)
    parser.add_argument("--swarms", nargs="+", default=["fast", "slow", "unequal"], help="real ones")
    parser.add_argument("--runs", type=Path, help="directory in which real swarms are kept, to predict them again")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="swarms at a time, one core each")
    parser.add_argument("--pieces", type=Path, help="directory for finished pieces, to resume from")
    parser.add_argument("--plots", type=Path, help="directory for the plots")
    options = parser.parse_args()
    pieces, result = Pieces(options.pieces, options.processes), dict[str, Any]()
    if "explain" in options.parts:
        result |= explain(options.intellect_steps, pieces, options.plots)
    if "scale" in options.parts:
        result |= scale(options.steps, options.short_steps, pieces, options.plots)
    if "real" in options.parts:
        real_swarms = importlib.import_module("real_swarms")
        result |= real_swarms.real(options.real_steps, options.swarms, options.runs)
    print(json.dumps({"benchmark": "simulate", **result, "machine": f"{platform.machine()}, {os.cpu_count()} cores"}))


if __name__ == "__main__":
    main()
