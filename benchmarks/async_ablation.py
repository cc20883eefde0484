"""Does lag hurt? GRPO on the demo task at asynchrony 0, 1, 2 and 4, at equal trained samples.

    python benchmarks/async_ablation.py [--levels 0 1 2 4] [--seeds 5] [--batches 40] [--runs build/async_ablation]

One process stands for the swarm: step s trains on groups that version s−k (not younger) generated, the worst case inside the
bound. Everything but the step size is the demo's recipe: bundled policy, online filter with its cap, engine, trainer. At four
times the default step, which is twice the demo's, lag costs. Every run trains on exactly batches × groups × 8 samples: steps
with fewer useful groups count for less, and the last batch is cut. `final_reward` is the mean task reward at temperature 1 on
held-out problems, averaged over the last three evaluations. Each finished run is a file in `--runs`, so an interrupted benchmark
goes on where it was; `--at-most N` stops after N more runs. `--correction` takes a lag correction instead of the recipe's none.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from shoal.config import ShoalConfig, load_config
from shoal.evaluation import mean_error
from shoal.files import write_atomic
from shoal.training import CORRECTIONS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.local_run import LocalRun  # noqa: E402

EVALUATE_EVERY = 4
"""Batches between two evaluations."""
LAST_EVALUATIONS = 3
STEPS_PER_BATCH = 4
"""Steps after which a run that finds no useful groups is stopped, per planned batch."""


@dataclass
class Curve:
    """Held-out reward by planned samples, and what the run took."""

    level: int
    seed: int
    heldout: list[tuple[int, float]] = field(default_factory=list)
    trained_samples: int = 0
    steps: int = 0
    kl_update_max: float = 0.0
    ratio_max: float = 0.0

    @property
    def final_reward(self) -> float:
        return statistics.fmean(value for _, value in self.heldout[-LAST_EVALUATIONS:])


def run(config: ShoalConfig, level: int, seed: int, batches: int, heldout: int) -> Curve:
    curve = Curve(level, seed)
    per_group = config.rollouts.group_size
    per_batch = config.training.groups_per_step * per_group
    marks = [number * per_batch for number in range(0, batches + 1, EVALUATE_EVERY)]
    with tempfile.TemporaryDirectory() as scratch:
        local = LocalRun(config, seed, Path(scratch))
        curve.heldout.append((marks.pop(0), local.heldout_reward(heldout)))
        while marks:
            curve.steps += 1
            if curve.steps > STEPS_PER_BATCH * batches:
                raise SystemExit(f"async {level}, seed {seed}: too few useful groups to train {batches} batches.")
            report = local.step(level, at_most=(marks[-1] - curve.trained_samples) // per_group)
            if report is not None:
                curve.trained_samples += report.samples
                curve.kl_update_max = max(curve.kl_update_max, report.kl_update)
                curve.ratio_max = max(curve.ratio_max, report.ratio_max)
            if curve.trained_samples >= marks[0]:
                curve.heldout.append((marks.pop(0), local.heldout_reward(heldout)))
    return curve


def all_curves(arguments: argparse.Namespace) -> list[Curve]:
    """Seed by seed, level by level, so that an interrupted benchmark still compares like with like."""
    base = load_config(ROOT / "configs" / "demo.toml")
    curves, left = [], arguments.at_most
    for seed in range(arguments.seeds):
        for level in arguments.levels:
            training = base.training.model_copy(
                update={
                    "async_level": level,
                    "groups_per_step": arguments.groups,
                    "device": "cpu",
                    "correction": arguments.correction,
                    "learning_rate": arguments.learning_rate,
                }
            )
            setting = f"{arguments.batches}x{arguments.groups}-{arguments.learning_rate:g}-{arguments.correction}"
            file = arguments.runs / f"async{level}-seed{seed}-{setting}.json"
            if not file.exists():
                if left == 0:
                    continue
                left -= 1
                config = base.model_copy(update={"training": training})
                curve = run(config, level, seed, arguments.batches, arguments.heldout)
                write_atomic(file, json.dumps(asdict(curve)).encode())
            curves.append(Curve(**json.loads(file.read_text())))
            _say(curves[-1])
    return curves


def _say(curve: Curve) -> None:
    print(
        f"async {curve.level}, seed {curve.seed}: held-out {curve.heldout[0][1]:.3f} → {curve.final_reward:.3f}"
        f" in {curve.steps} steps, {curve.trained_samples} samples",
        flush=True,
    )


def plot(curves: Sequence[Curve], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes: Any = figure.add_subplot()
    for level in sorted({curve.level for curve in curves}):
        chosen = [curve for curve in curves if curve.level == level]
        samples = [count for count, _ in chosen[0].heldout]
        columns = list(zip(*([value for _, value in curve.heldout] for curve in chosen), strict=True))
        means, errors = [statistics.fmean(column) for column in columns], [mean_error(column) for column in columns]
        axes.plot(samples, means, label=f"async {level}")
        lower = [mean - error for mean, error in zip(means, errors, strict=True)]
        upper = [mean + error for mean, error in zip(means, errors, strict=True)]
        axes.fill_between(samples, lower, upper, alpha=0.15)
    axes.set(xlabel="trained samples", ylabel="held-out task reward")
    axes.set_title(f"Demo task: mean and 95 % interval over {len({curve.seed for curve in curves})} seeds")
    axes.grid(alpha=0.2)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def summarise(curves: Sequence[Curve]) -> dict[str, Any]:
    levels = sorted({curve.level for curve in curves})
    finals = {level: {curve.seed: curve.final_reward for curve in curves if curve.level == level} for level in levels}
    means = {level: statistics.fmean(values.values()) for level, values in finals.items()}
    paired = [finals[2][seed] - finals[0][seed] for seed in finals.get(0, {}) if seed in finals.get(2, {})]

    def by_level(value: Callable[[Curve], float], choose: Callable[[list[float]], float]) -> dict[str, float]:
        return {
            str(level): round(choose([value(curve) for curve in curves if curve.level == level]), 4) for level in levels
        }

    return {
        "final_reward": {str(level): round(mean, 4) for level, mean in means.items()},
        "confidence_95": {str(level): round(mean_error(list(finals[level].values())), 4) for level in levels},
        "delta_2_vs_0": round(statistics.fmean(paired), 4) if paired else None,
        "delta_2_vs_0_confidence_95": round(mean_error(paired), 4),
        "start_reward": round(statistics.fmean(curve.heldout[0][1] for curve in curves), 4),
        "trained_samples": sorted({curve.trained_samples for curve in curves}),
        "steps_mean": by_level(lambda curve: curve.steps, statistics.fmean),
        "ratio_max": by_level(lambda curve: curve.ratio_max, max),
        "kl_update_max": by_level(lambda curve: curve.kl_update_max, max),
        "seeds": {str(level): len(finals[level]) for level in levels},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=40, help="Full batches to train on; a multiple of 4.")
    parser.add_argument("--groups", type=int, default=16, help="Useful groups in a batch.")
    parser.add_argument("--heldout", type=int, default=256, help="Held-out problems of one evaluation.")
    parser.add_argument("--correction", default="none", choices=sorted(CORRECTIONS))
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="The demo itself uses 1e-4.")
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "async_ablation")
    parser.add_argument("--at-most", type=int, default=-1, help="Train at most this many missing runs.")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "async_ablation.png")
    arguments = parser.parse_args()
    if arguments.batches % EVALUATE_EVERY:
        parser.error(f"--batches must be a multiple of {EVALUATE_EVERY}")
    torch.set_num_threads(1)
    arguments.runs.mkdir(parents=True, exist_ok=True)
    curves = all_curves(arguments)
    plot(curves, arguments.plot)
    result = {"benchmark": "async_ablation"} | summarise(curves)
    result |= {"batches": arguments.batches, "groups_per_step": arguments.groups, "heldout": arguments.heldout}
    result |= {"learning_rate": arguments.learning_rate, "correction": arguments.correction}
    result["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    print(json.dumps(result))


if __name__ == "__main__":
    main()
