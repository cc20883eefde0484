"""How far the published bf16 policy lags behind the fp32 master weights: in the middle of their rounding intervals or dithered.

    python benchmarks/masters.py [--learning-rates 3e-6 1e-5] [--steps 20] [--seeds 2]

GRPO on the demo task without any lag: the groups of a step come from the version that the trainer has just published, so the
divergence between trainer and behaviour policy is rounding alone. Both sides see the same tasks and seeds and take turns. `hidden`
is that divergence per token, averaged over the second half of the run; `rise` the held-out task reward that the published
policy gained. The ratio says how many times closer dithering keeps the two policies.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from shoal.config import ShoalConfig, load_config

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.local_run import LocalRun  # noqa: E402

SIDES = {"exact": False, "spread": True}


def run(config: ShoalConfig, seed: int, steps: int, heldout: int) -> tuple[float, float]:
    """Divergence in the second half, and what the published policy gained."""
    divergences = []
    with tempfile.TemporaryDirectory() as scratch:
        local = LocalRun(config, seed, Path(scratch))
        before = local.heldout_reward(heldout)
        for _ in range(steps):
            report = local.step(0)
            if report is not None and report.kl_behaviour is not None:
                divergences.append(report.kl_behaviour)
        gained = local.heldout_reward(heldout) - before
    return statistics.fmean(divergences[len(divergences) // 2 :]), gained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[3e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--heldout", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for rate in options.learning_rates:
        found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        for seed in range(options.seeds):
            for side, spread in SIDES.items():
                settings = ["--training.learning_rate", str(rate), "--training.dither_masters", str(spread).lower()]
                config = load_config(ROOT / "configs" / "demo.toml", settings)
                found[side].append(run(config, seed, options.steps, options.heldout))
        hidden = {side: statistics.fmean(one for one, _ in values) for side, values in found.items()}
        rises = {side: round(statistics.fmean(gain for _, gain in values), 4) for side, values in found.items()}
        rows.append(
            {
                "learning_rate": rate,
                "hidden": {side: float(f"{value:.3g}") for side, value in hidden.items()},
                "ratio": round(hidden["exact"] / hidden["spread"], 2),
                "rise": rises,
            }
        )
        print(rows[-1], flush=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    print(
        json.dumps(
            {"benchmark": "masters", "rates": rows, "steps": options.steps, "seeds": options.seeds, "machine": machine}
        )
    )


if __name__ == "__main__":
    main()
