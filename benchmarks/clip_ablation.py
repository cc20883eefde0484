"""What the second side of the clip is for: a stress setting with and without δ.

    python benchmarks/clip_ablation.py [--seeds 3] [--steps 8] [--plot docs/images/clip_ablation.png]

The demo's policy and task under conditions that let ratios grow within one batch: a large step size, many mini-batches and passes
over each batch, rollouts that are 4 versions old, loose gradient clipping. Both runs see the same rollouts in the first step;
the only difference is the loss: `dapo` (ratio unbounded where the advantage is negative) or `two_sided_grpo` (bounded by δ = 4).
A spike is a training step whose largest gradient norm exceeds ten times the two-sided run's median.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shoal.config import ShoalConfig, load_config
from shoal.training import DivergedError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.local_run import LocalRun  # noqa: E402

LAG = 4
STRESS = {
    "learning_rate": 3e-4,
    "warmup_steps": 0,
    "max_grad_norm": 0.5,
    "minibatches": 8,
    "epochs": 2,
    "groups_per_step": 16,
    "kl_limit": 1e9,
}
SIDES = {"one_sided": "dapo", "two_sided": "two_sided_grpo"}
SPIKE = 10.0


@dataclass
class Trace:
    """One run: largest gradient norm, ratio and loss of every step, and the reward it ended with."""

    side: str
    seed: int
    grad_norms: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    heldout: float = 0.0
    diverged: bool = False


def run(config: ShoalConfig, side: str, seed: int, steps: int) -> Trace:
    training = config.training.model_copy(update=STRESS | {"loss": SIDES[side]})
    trace = Trace(side, seed)
    with tempfile.TemporaryDirectory() as scratch:
        local = LocalRun(config.model_copy(update={"training": training}), seed, Path(scratch))
        try:
            for _ in range(steps):
                report = local.step(LAG)
                if report is not None:
                    trace.grad_norms.append(report.grad_norm_max)
                    trace.ratios.append(report.ratio_max)
                    trace.losses.append(abs(report.policy_loss))
        except DivergedError:
            trace.diverged = True
        trace.heldout = local.heldout_reward(128)
    return trace


def plot(traces: Sequence[Trace], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    panels: Any = figure.subplots(1, 2)
    for trace in traces:
        colour = "tab:red" if trace.side == "one_sided" else "tab:blue"
        label = trace.side.replace("_", "-") if trace.seed == 0 else None
        panels[0].semilogy(trace.grad_norms, color=colour, alpha=0.7, label=label)
        panels[1].semilogy(trace.ratios, color=colour, alpha=0.7, label=label)
    panels[0].set(xlabel="training step", title="largest gradient norm")
    panels[1].set(xlabel="training step", title="largest ratio")
    panels[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def summarise(traces: Sequence[Trace]) -> dict[str, Any]:
    by_side = {side: [trace for trace in traces if trace.side == side] for side in SIDES}
    norms = {side: [norm for trace in chosen for norm in trace.grad_norms] for side, chosen in by_side.items()}
    usual = statistics.median(norms["two_sided"])
    return {
        "grad_norm_max": {side: round(max(values), 2) for side, values in norms.items()},
        "grad_norm_median": {side: round(statistics.median(values), 3) for side, values in norms.items()},
        "spikes": {side: sum(norm > SPIKE * usual for norm in values) for side, values in norms.items()},
        "ratio_max": {
            side: round(max(r for trace in chosen for r in trace.ratios), 1) for side, chosen in by_side.items()
        },
        "loss_max": {
            side: round(max(x for trace in chosen for x in trace.losses), 4) for side, chosen in by_side.items()
        },
        "heldout": {
            side: round(statistics.fmean(trace.heldout for trace in chosen), 3) for side, chosen in by_side.items()
        },
        "diverged": {side: sum(trace.diverged for trace in chosen) for side, chosen in by_side.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "clip_ablation.png")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    config = load_config(ROOT / "configs" / "demo.toml")
    traces = []
    for seed in range(arguments.seeds):
        for side in SIDES:
            traces.append(run(config, side, seed, arguments.steps))
            print(
                f"{side}, seed {seed}: gradient norms {[round(norm, 2) for norm in traces[-1].grad_norms]}", flush=True
            )
    plot(traces, arguments.plot)
    result = summarise(traces) | {
        "benchmark": "clip_ablation",
        "seeds": arguments.seeds,
        "steps": arguments.steps,
        "stress": STRESS | {"lag": LAG},
        "wall_s": round(time.monotonic() - started, 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
