"""How fresh are trained groups, and does the trainer wait? Leases just in time against leases at once, with real roles.

    python benchmarks/freshness.py [--steps 48] [--rounds 3] [--speeds 4 2 1] [--groups 8] [--minutes 8]

Coordinator, trainer with origin, relay, validator and one worker, each its own process, with the bundled policy and the demo task,
async level 2. A first run with an unhindered trainer measures how long the swarm needs for a batch; then the trainer pauses in each
step (a plain sleep, stated as `pause_s`), so that a step takes 1, 2 or 4 times as long as a batch. Both ways take turns, round by
round; medians over rounds count. The first steps (WARM_UP_STEPS) do not count: the rule has to measure three cycles first.

`mean_age` is of trained groups at the highest speed with the rule; `trainer_wait_added` is the share of time that the trainer waits
for batches with the rule − without, at that speed; `slow_swarm_ratio` is steps per minute with the rule ÷ without, with a trainer
that does not pause, so that the swarm is too slow. Runs are kept in `--pieces`; with `--minutes` the same command goes on later.
"""

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.config import ShoalConfig, build_config

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 8
CALIBRATION_STEPS = 8
ASYNC_LEVEL = 2


@dataclass(frozen=True)
class Measured:
    """One run after its warm-up."""

    mean_age: float
    mean_age_all_steps: float
    wait_share: float
    step_s: float
    fill_s: float


def make_config(root: Path, steps: int, groups: int, ports: list[int], *, just_in_time: bool) -> ShoalConfig:
    overlap = importlib.import_module("overlap")
    tree: dict[str, Any] = overlap.make_config(root, ASYNC_LEVEL, steps, groups, ports).model_dump()
    tree["coordinator"]["just_in_time"] = just_in_time
    tree["rollouts"] |= {"tasks_per_slot": 2, "max_new_tokens": 32}
    return build_config(tree)


def run(steps: int, groups: int, pause_s: float, *, just_in_time: bool) -> Measured:
    overlap, broadcast = importlib.import_module("overlap"), importlib.import_module("broadcast")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        ports = [broadcast.free_port() for _ in range(3)]
        config = make_config(root, steps, groups, ports, just_in_time=just_in_time)
        trainer = [sys.executable, __file__, "--trainer", str(root / "run"), "--pause", str(pause_s)]
        relay_url = f"http://127.0.0.1:{ports[2]}"
        with overlap.roles(root, config, ports[2], relay_url, trainer=trainer) as processes:
            overlap.wait_until_finished(root, processes, steps)
        return measure(root / "run", steps)


def train(directory: Path, pause_s: float) -> None:
    """In the child: the trainer's role, with a pause after every update."""
    from shoal.roles import trainer as role
    from shoal.rundir import RunDirectory
    from shoal.training import Trainer

    train_step = Trainer.train_step

    def paused(trainer: Trainer, groups: Any, settle: Any = None) -> Any:
        report = train_step(trainer, groups, settle)
        time.sleep(pause_s)
        return report

    Trainer.train_step = paused  # type: ignore[method-assign, assignment]
    role.train(RunDirectory(directory), print, threads=1)


def measure(directory: Path, steps: int) -> Measured:
    overlap = importlib.import_module("overlap")
    lines = [json.loads(line) for line in (directory / "trainer" / "steps.jsonl").read_text().splitlines()]
    published = {
        event["version"]: event["at"] for event in overlap.events(directory / "events/trainer.jsonl", "published")
    }
    counted = [line for line in lines if line["step"] >= WARM_UP_STEPS]
    seconds = published[steps] - published[WARM_UP_STEPS]
    timing = overlap.events(directory / "events/coordinator.jsonl", "lease_timing")
    return Measured(
        mean_age=_mean_age(counted),
        mean_age_all_steps=_mean_age(lines),
        wait_share=sum(line["time_wait_batch_s"] for line in counted) / seconds,
        step_s=seconds / (steps - WARM_UP_STEPS),
        fill_s=max((event["slowest_fill_s"] for event in timing), default=0.0),
    )


def _mean_age(lines: list[dict[str, Any]]) -> float:
    ages = [(int(age), int(count)) for line in lines for age, count in line["age_histogram"].items()]
    return sum(age * count for age, count in ages) / sum(count for _, count in ages)


def _free(groups: int) -> Measured:
    """The swarm with a trainer that does not pause: how long a batch takes."""
    return run(WARM_UP_STEPS + CALIBRATION_STEPS, groups, 0.0, just_in_time=False)


def compare(speed: float, batch_s: float, rounds: int, arguments: argparse.Namespace, pieces: Any) -> dict[str, Any]:
    """Both ways in turns, with a trainer that the swarm is `speed` times as fast as; 0 lets the trainer run freely."""
    pause_s = max(0.0, speed * batch_s)
    sides: dict[str, list[Measured]] = {"in_time": [], "at_once": []}

    def one(side: str) -> dict[str, float]:
        return asdict(run(arguments.steps, arguments.groups, pause_s, just_in_time=side == "in_time"))

    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else list(reversed(sides)):
            found = pieces.get(f"speed {speed:g}, round {number}, {name}", lambda name=name: one(name))
            sides[name].append(Measured(**found))
    result: dict[str, Any] = {"pause_s": round(pause_s, 3), "rounds": rounds}
    for name, runs in sides.items():
        fields = ("mean_age", "mean_age_all_steps", "wait_share", "step_s")
        result[name] = {field: round(statistics.median(getattr(one, field) for one in runs), 3) for field in fields}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--other-rounds", type=int, default=1, help="Of speeds but the highest, which are reported only."
    )
    parser.add_argument("--speeds", type=float, nargs="+", default=[4.0, 2.0, 1.0])
    parser.add_argument("--groups", type=int, default=8, help="Useful groups in a batch.")
    parser.add_argument("--without-slow-swarm", action="store_true", help="Leave out the run whose swarm is too slow.")
    importlib.import_module("pieces").add_flags(parser, ROOT / "build" / "freshness.json")
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pause", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trainer:
        train(arguments.trainer, arguments.pause)
        return
    pieces = importlib.import_module("pieces").of(arguments, (arguments.steps, arguments.groups))
    free = Measured(**pieces.get("free", lambda: asdict(_free(arguments.groups))))
    highest = max(arguments.speeds)
    fastest = compare(highest, free.step_s, arguments.rounds, arguments, pieces)
    slow = None
    if not arguments.without_slow_swarm:
        slow = compare(0.0, free.step_s, arguments.rounds, arguments, pieces)
    speeds = {f"{highest:g}": fastest}
    for speed in sorted(set(arguments.speeds) - {highest}, reverse=True):
        speeds[f"{speed:g}"] = compare(speed, free.step_s, arguments.other_rounds, arguments, pieces)
    result = {
        "benchmark": "freshness",
        "mean_age": fastest["in_time"]["mean_age"],
        "mean_age_at_once": fastest["at_once"]["mean_age"],
        "trainer_wait_added": round(fastest["in_time"]["wait_share"] - fastest["at_once"]["wait_share"], 4),
        "batch_s": round(free.step_s, 3),
        "speeds": speeds,
    }
    if slow is not None:
        result |= {"slow_swarm_ratio": round(slow["at_once"]["step_s"] / slow["in_time"]["step_s"], 3), "slow": slow}
    rest = {"steps": arguments.steps, "rounds": arguments.rounds, "groups_per_step": arguments.groups}
    print(json.dumps({**result, **rest, "machine": f"{platform.machine()}, {os.cpu_count()} cores"}))


if __name__ == "__main__":
    main()
