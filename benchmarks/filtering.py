"""Does filtering pay? The demo task among many too easy and impossible ones, with and without filters, at equal generated samples.

    python benchmarks/filtering.py [--arms both none offline online] [--seeds 5] [--samples 4096] [--runs DIR]

The task set is a quarter chain sums as in the demo, the rest noise: on three in eight any integer counts (always solved), three in
eight ask for a product (never solved). *offline* keeps the tasks that the bundled policy solves in 12.5–50 % of 8 samples, as
`shoal curate` does; *online* drops groups whose task rewards are all equal. Every arm generates the same number of samples; the
metrics called charged take those of the offline filter off its budget. Each finished run is a file in DIR: a benchmark that was
interrupted goes on where it was.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from shoal.config import ShoalConfig, load_config
from shoal.curation.band import Band, solve_rates
from shoal.evaluation import AnswerGenerator, SamplingSettings, mean_error
from shoal.files import write_atomic
from shoal.tasks import THINK_CLOSE, Task, TaskSet, TaskSets, load_tasks, verifier
from shoal.training.packing.samples import Group

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.local_run import LocalRun  # noqa: E402

ARMS = {"both": (True, True), "none": (False, False), "offline": (True, False), "online": (False, True)}
"""Offline filter, online filter."""
CURATION_SAMPLES = 8
EVALUATE_EVERY = 512
LAST_EVALUATIONS = 3


@verifier(exact=True)
def any_integer(task: Task, completion_text: str) -> tuple[float, str]:
    """Right for whatever integer is answered."""
    answered = completion_text.partition(THINK_CLOSE)[2].strip()
    return (1.0, "an integer") if answered.removeprefix("-").isdecimal() else (0.0, "no integer")


EASY = f"{__name__}:any_integer"


def mixed_tasks(tasks: TaskSet, seed: int) -> TaskSet:
    """Of eight tasks, two as they are, three too easy, three impossible, in random order."""
    rng = random.Random(f"mix/{seed}")
    return TaskSet(_disguised(task, rng.randrange(8)) for task in tasks)


def _disguised(task: Task, kind: int) -> Task:
    if kind < 2:
        return task
    if kind < 5:
        return task.model_copy(update={"problem_id": f"easy/{task.problem_id}", "task_type": EASY})
    first, second, third = task.metadata["terms"]
    return task.model_copy(
        update={
            "problem_id": f"impossible/{task.problem_id}",
            "prompt": f"Compute {first}*{abs(second)}*{abs(third)}.",
            "verification_info": {"answer": first * abs(second) * abs(third)},
        }
    )


class CountedRun(LocalRun):
    """Counts every generated sample, and trains on groups without signal too where the online filter is off."""

    generated = 0
    online = True

    def generate(self, version: int, count: int) -> list[Group]:
        self.generated += count * self.config.rollouts.group_size
        return super().generate(version, count)

    def useful_groups(self, version: int) -> list[Group]:
        if self.online:
            return super().useful_groups(version)
        self.engine.load(self._weights / str(version))
        return self.generate(version, self.config.training.groups_per_step)


def curated(local: LocalRun, tasks: TaskSet, count: int) -> TaskSet:
    """The tasks among the first `count` that the untrained policy solves sometimes."""
    config = local.config
    settings = SamplingSettings(
        samples=CURATION_SAMPLES,
        temperature=config.rollouts.temperature,
        max_new_tokens=config.rollouts.max_new_tokens,
        target_lengths=config.reward.target_lengths,
        seed="curation",
    )
    candidates = [tasks[index] for index in range(count)]
    rates = solve_rates(AnswerGenerator(local.engine, local.codec, settings).answer(candidates))
    return TaskSet(task for task in candidates if not Band().refusal(rates[task.problem_id]))


def run(config: ShoalConfig, arm: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    offline, online = ARMS[arm]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        local = CountedRun(config, seed, Path(scratch))
        local.online = online
        mixed = mixed_tasks(load_tasks(config.tasks).train, seed)
        train = curated(local, mixed, arguments.candidates) if offline else mixed
        local.tasks = TaskSets(train=train, heldout=local.tasks.heldout)
        curve = list(learn(local, arguments))
    charged = CURATION_SAMPLES * arguments.candidates if offline else 0
    return {
        "arm": arm,
        "seed": seed,
        "tasks": len(train),
        "charged": charged,
        "curve": curve,
        "steps": local.trainer.step,
        "seconds": time.monotonic() - started,
    }


def learn(local: CountedRun, arguments: argparse.Namespace) -> Iterator[tuple[int, float]]:
    """(generated samples, held-out task reward) every so often; stops before a step could exceed the budget."""
    training = local.config.training
    groups = training.groups_per_step * (training.oversampling if local.online else 1)
    step_samples = int(groups) * local.config.rollouts.group_size
    yield 0, local.heldout_reward(arguments.heldout)
    due = EVALUATE_EVERY
    while local.generated + step_samples <= arguments.samples:
        local.step(0)
        last = local.generated + step_samples > arguments.samples
        if local.generated >= due or last:
            due = local.generated + EVALUATE_EVERY
            yield local.generated, local.heldout_reward(arguments.heldout)


def all_runs(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Seed by seed, so that an interrupted benchmark still compares like with like."""
    torch.set_num_threads(1)
    config = load_config(
        ROOT / "configs" / "demo.toml",
        [f"--training.groups_per_step={arguments.groups}", f"--training.learning_rate={arguments.learning_rate}"],
    )
    plan = plan_digest(config, arguments)
    for seed in range(arguments.seeds):
        for arm in arguments.arms:
            path = arguments.runs / f"{arm}-{seed}-{plan}.json"
            if not path.exists():
                write_atomic(path, json.dumps(run(config, arm, seed, arguments)).encode())
            result = json.loads(path.read_bytes())
            print(f"{arm}, seed {seed}: held-out {result['curve'][0][1]:.3f} → {final_reward(result):.3f}", flush=True)
            yield result


def plan_digest(config: ShoalConfig, arguments: argparse.Namespace) -> str:
    """What a run depends on besides arm and seed: runs of other settings are never mixed in."""
    settings = {
        name: config.model_dump(mode="json")[name] for name in ("model", "tasks", "rollouts", "reward", "training")
    }
    settings |= {name: getattr(arguments, name) for name in ("samples", "candidates", "heldout")}
    return blake3(json.dumps(settings, sort_keys=True).encode()).hexdigest(8)


def final_reward(result: dict[str, Any], *, charge: bool = False) -> float:
    """Mean of the last evaluations; with `charge`, of those within the budget that curation left."""
    last = result["curve"][-1][0] - (result["charged"] if charge else 0)
    values = [value for samples, value in result["curve"] if samples <= last]
    return statistics.fmean(values[-LAST_EVALUATIONS:])


LABELS = {
    "both": "offline and online filter",
    "none": "no filter",
    "offline": "offline filter only",
    "online": "online filter only",
}


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes: Any = figure.add_subplot()
    for arm in [arm for arm in ARMS if any(run["arm"] == arm for run in runs)]:
        curves = [run["curve"] for run in runs if run["arm"] == arm]
        grid = np.linspace(0, min(curve[-1][0] for curve in curves), 40)
        rows = np.array([np.interp(grid, *np.array(curve).T) for curve in curves])
        means, errors = rows.mean(axis=0), np.array([mean_error(list(column)) for column in rows.T])
        axes.plot(grid, means, label=LABELS[arm])
        axes.fill_between(grid, means - errors, means + errors, alpha=0.15)
    axes.set(
        xlabel="generated samples",
        ylabel="held-out task reward",
        title="A quarter learnable tasks: mean and 95 % interval over seeds",
    )
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4096, help="completions that each run generates")
    parser.add_argument("--groups", type=int, default=16, help="groups of a training batch")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="Twice the demo's: no rollout is old here.")
    parser.add_argument("--candidates", type=int, default=256, help="tasks that the offline filter looks at")
    parser.add_argument("--heldout", type=int, default=256)
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "filtering")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "filtering.png")
    arguments = parser.parse_args()
    runs = list(all_runs(arguments))
    finals = {arm: [final_reward(run) for run in runs if run["arm"] == arm] for arm in arguments.arms}
    charged = {arm: [final_reward(run, charge=True) for run in runs if run["arm"] == arm] for arm in arguments.arms}
    plot(runs, arguments.plot)
    print(
        json.dumps(
            {
                "benchmark": "filtering",
                "filtered_final_reward": round(statistics.fmean(finals["both"]), 4) if "both" in finals else None,
                "unfiltered_final_reward": round(statistics.fmean(finals["none"]), 4) if "none" in finals else None,
                "seed_error": round(max(mean_error(values) for values in finals.values()), 4),
                "start_reward": round(statistics.fmean(run["curve"][0][1] for run in runs), 4),
                "final_reward": {arm: round(statistics.fmean(values), 4) for arm, values in finals.items()},
                "final_reward_charged": {arm: round(statistics.fmean(values), 4) for arm, values in charged.items()},
                "confidence_95": {arm: round(mean_error(values), 4) for arm, values in finals.items()},
                "steps": {arm: [run["steps"] for run in runs if run["arm"] == arm] for arm in arguments.arms},
                "generated_samples": arguments.samples,
                "curation_samples": CURATION_SAMPLES * arguments.candidates,
                "learning_rate": arguments.learning_rate,
                "seeds": arguments.seeds,
                "wall_s": round(sum(run["seconds"] for run in runs), 1),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
            }
        )
    )


if __name__ == "__main__":
    main()
