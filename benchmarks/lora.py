"""Does an adapter learn what full training learns? Ranks 1, 16 and full beside all weights, on the demo task.

    python benchmarks/lora.py [--steps 24] [--seeds 3] [--arms ARM ...] [--pieces DIR] [--write]

GRPO in one process at the demo's lag of two versions (tests/support/local_run.py), from the bundled policy and with its settings.
Learning rates are tuned for full training and for adapters alike: seed 100 tries each rate of `RATES` and the best one is used for
the seeds that count; it is stated as `learning_rates`. `final_reward` is the task reward on held-out problems, averaged over the
last `LAST` evaluations; its interval is Student's t over the seeds. `gap_rank16` is full training minus rank 16, seed by seed.
A run that diverges (`training.kl_limit`) counts as reward 0.
Every run is a piece of its own in --pieces: what was cut off goes on where it stopped.
"""

import argparse
import json
import math
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.config import ShoalConfig, load_config
from shoal.files import write_atomic
from shoal.training.trainer import DivergedError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.local_run import LocalRun  # noqa: E402

RESULT = ROOT / "docs" / "results" / "lora.json"
ARMS = {"full": 0, "rank1": 1, "rank16": 16, "full_rank": 128}
RATES = {"full": (5e-5, 1e-4, 2e-4, 4e-4), "adapter": (5e-4, 1e-3, 2e-3)}
TUNING_SEED, TUNED_RANK = 100, 16
LAG, EVERY, LAST, HELDOUT = 2, 5, 3, 256
STUDENT_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}
"""Quantiles for that many seeds."""


def settings(rank: int, rate: float) -> ShoalConfig:
    flags = ["--model.lora.rank", str(rank), "--training.learning_rate", str(rate), "--training.device", "cpu"]
    return load_config(ROOT / "configs" / "demo.toml", flags)


def curve(rank: int, rate: float, seed: int, steps: int, heldout: int) -> list[float]:
    """Held-out reward before the first step and after every few."""
    with tempfile.TemporaryDirectory() as scratch:
        local = LocalRun(settings(rank, rate), seed, Path(scratch))
        found = [local.heldout_reward(heldout)]
        try:
            for step in range(1, steps + 1):
                local.step(LAG)
                if step % EVERY == 0 or step == steps:
                    found.append(local.heldout_reward(heldout))
        except DivergedError:
            found += [0.0] * LAST
        local.trainer.close()
    return found


class Pieces:
    """Curves, one file each."""

    def __init__(self, directory: Path, steps: int, heldout: int) -> None:
        self._directory, self._steps, self._heldout = directory, steps, heldout
        directory.mkdir(parents=True, exist_ok=True)

    def final(self, rank: int, rate: float, seed: int) -> float:
        path = self._directory / f"{rank}-{rate:g}-{seed}-{self._steps}-{self._heldout}.json"
        if not path.exists():
            found = curve(rank, rate, seed, self._steps, self._heldout)
            write_atomic(path, json.dumps(found).encode())
            print(f"rank {rank}, rate {rate:g}, seed {seed}: {[round(one, 3) for one in found]}", flush=True)
        return statistics.fmean(json.loads(path.read_bytes())[-LAST:])


def interval(values: Sequence[float]) -> list[float]:
    mean, half = statistics.fmean(values), math.inf
    if len(values) > 1:
        half = STUDENT_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return [round(mean - half, 4), round(mean + half, 4)]


def measure(pieces: Pieces, seeds: int, arms: Sequence[str]) -> dict[str, Any]:
    tuned = {"full": 0, "adapter": TUNED_RANK}
    tried = {
        kind: {rate: pieces.final(tuned[kind], rate, TUNING_SEED) for rate in rates} for kind, rates in RATES.items()
    }
    best = {kind: max(found, key=lambda rate: found[rate]) for kind, found in tried.items()}
    finals: dict[str, list[float]] = {arm: [] for arm in arms}
    for seed in range(seeds):
        for arm in arms:
            finals[arm].append(pieces.final(ARMS[arm], best["adapter" if ARMS[arm] else "full"], seed))
    gaps = [full - adapter for full, adapter in zip(finals["full"], finals["rank16"], strict=True)]
    return {
        "benchmark": "lora",
        "final_reward": {arm: round(statistics.fmean(values), 4) for arm, values in finals.items()},
        "final_reward_95": {arm: interval(values) for arm, values in finals.items()},
        "gap_rank16": round(statistics.fmean(gaps), 4),
        "gap_rank16_95": interval(gaps),
        "learning_rates": best,
        "rates_tried": {
            kind: {f"{rate:g}": round(found, 4) for rate, found in one.items()} for kind, one in tried.items()
        },
        "seeds": seeds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 6))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="`full` and `rank16` at least")
    parser.add_argument("--heldout", type=int, default=HELDOUT)
    parser.add_argument("--pieces", type=Path, default=ROOT / "build" / "lora")
    parser.add_argument("--write", action="store_true", help=f"store the result in {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(Pieces(options.pieces, options.steps, options.heldout), options.seeds, options.arms)
    result |= {"steps": options.steps, "machine": f"{platform.machine()}, 1 thread, torch {torch.__version__}"}
    if options.write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
