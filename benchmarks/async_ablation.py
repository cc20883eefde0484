"""Does lag hurt? GRPO on the demo task at asynchrony 0, 1, 2 and 4, at equal trained samples.

    python benchmarks/async_ablation.py [--levels 0 1 2 4] [--seeds 5] [--steps 40] [--groups 16] [--jobs 1]

One process stands for the swarm: step s trains on groups that version s−k (not younger) generated, the worst case inside the
bound. Everything else is the demo's recipe: bundled policy, online filter with its cap, engine, trainer. `final_reward` is the
mean task reward at temperature 1 on held-out problems, averaged over the last three of the evaluations made every 4 steps.
"""

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from shoal.config import ShoalConfig, load_config
from shoal.training.simulation import Simulation

ROOT = Path(__file__).resolve().parents[1]
EVALUATE_EVERY = 4
LAST_EVALUATIONS = 3
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 10: 2.26}
"""Student's t for a 95 % interval, by number of seeds."""


@dataclass
class Curve:
    level: int
    seed: int
    heldout: list[tuple[int, float]] = field(default_factory=list)
    trained_samples: int = 0

    @property
    def final_reward(self) -> float:
        return statistics.fmean(value for _, value in self.heldout[-LAST_EVALUATIONS:])


def run(config: ShoalConfig, level: int, seed: int, steps: int, groups: int, heldout: int) -> Curve:
    torch.set_num_threads(1)
    training = config.training.model_copy(update={"async_level": level, "groups_per_step": groups})
    curve = Curve(level, seed)
    with tempfile.TemporaryDirectory() as scratch:
        simulation = Simulation(config.model_copy(update={"training": training}), seed, Path(scratch))
        curve.heldout.append((0, simulation.heldout_reward(heldout)))
        for step in range(1, steps + 1):
            report = simulation.step(level)
            curve.trained_samples += report.samples if report else 0
            if step % EVALUATE_EVERY == 0:
                curve.heldout.append((step, simulation.heldout_reward(heldout)))
    return curve


def all_curves(arguments: argparse.Namespace) -> Iterator[Curve]:
    """Seed by seed, level by level, so that an interrupted run still compares like with like."""
    jobs = [(level, seed) for seed in range(arguments.seeds) for level in arguments.levels]
    config = load_config(ROOT / "configs" / "demo.toml")
    settings = (arguments.steps, arguments.groups, arguments.heldout)
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(run, config, level, seed, *settings) for level, seed in jobs]:
            curve = future.result()
            print(
                f"async {curve.level}, seed {curve.seed}: held-out {curve.heldout[0][1]:.3f} → {curve.final_reward:.3f}",
                flush=True,
            )
            yield curve


def interval(values: Sequence[float]) -> float:
    """Half width of the 95 % confidence interval of the mean."""
    if len(values) < 2:
        return 0.0
    return float(T_95.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values)))


def plot(curves: Sequence[Curve], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes: Any = figure.add_subplot()
    for level in sorted({curve.level for curve in curves}):
        chosen = [curve for curve in curves if curve.level == level]
        steps = [step for step, _ in chosen[0].heldout]
        rows = [[value for _, value in curve.heldout] for curve in chosen]
        means = [statistics.fmean(column) for column in zip(*rows, strict=True)]
        errors = [interval(column) for column in zip(*rows, strict=True)]
        axes.plot(steps, means, label=f"async {level}")
        axes.fill_between(
            steps,
            [mean - error for mean, error in zip(means, errors, strict=True)],
            [mean + error for mean, error in zip(means, errors, strict=True)],
            alpha=0.15,
        )
    axes.set(
        xlabel="training step", ylabel="held-out task reward", title="Demo task, mean and 95 % interval over seeds"
    )
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--heldout", type=int, default=256)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "async_ablation.png")
    arguments = parser.parse_args()
    started = time.monotonic()
    curves = list(all_curves(arguments))
    finals = {level: [curve.final_reward for curve in curves if curve.level == level] for level in arguments.levels}
    means = {level: statistics.fmean(values) for level, values in finals.items()}
    plot(curves, arguments.plot)
    result = {
        "benchmark": "async_ablation",
        "final_reward": {str(level): round(mean, 4) for level, mean in means.items()},
        "confidence_95": {str(level): round(interval(values), 4) for level, values in finals.items()},
        "delta_2_vs_0": round(means[2] - means[0], 4) if {0, 2} <= set(means) else None,
        "start_reward": round(statistics.fmean(curve.heldout[0][1] for curve in curves), 4),
        "trained_samples": {
            str(level): sorted({curve.trained_samples for curve in curves if curve.level == level})
            for level in arguments.levels
        },
        "seeds": arguments.seeds,
        "steps": arguments.steps,
        "groups_per_step": arguments.groups,
        "wall_s": round(time.monotonic() - started, 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
