"""How much poison a run trains on when keys that earned the audit floor turn hostile.

    python benchmarks/poison.py [--runs build/poison] [--groups 840] [--careers 30] [--seeds 5]

The demo's recipe (bundled policy, 8 groups per slot, batches of 32) gives real policy versions. `honest`: the trainer's statistic
of honest groups at ages 0 to 2 and three temperatures. `kinds`: poisoned groups of five kinds, each with the trainer's statistic
and the verdict of a real audit. `careers`: the coordinator's own code with 8 honest keys and 1 or 3 hostile ones, all at the floor;
hostile keys forge all groups of a file, only as many useful ones as may stay without an audit, or a single one, and the worst of
the three counts. `heldout`: real trainings with the groups that the worst career consumed, and without. Every piece is a file in
`--runs`, so an interrupted benchmark goes on where it was.
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.poisoning.careers import STRATEGIES, careers  # noqa: E402
from benchmarks.poisoning.forgeries import KINDS, kinds  # noqa: E402
from benchmarks.poisoning.policies import AGES, VERSIONS, Policies, demo, honest  # noqa: E402
from benchmarks.poisoning.trainings import POISONED_STEPS, TRAINED_STEPS, training  # noqa: E402
from shoal.files import write_atomic  # noqa: E402

TEMPERATURES = (0.6, 1.0, 1.3)


def piece(runs: Path, name: str, make: Callable[[], Any]) -> Any:
    path = runs / f"{name}.json"
    if not path.exists():
        write_atomic(path, json.dumps(make()).encode())
        print(json.dumps({"piece": name}), flush=True)
    return json.loads(path.read_text())


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def tail_fit(values: Sequence[float], share: float = 0.02) -> dict[str, float]:
    """Exponential tail above a high quantile (method of means), and the limit that one honest group in a million exceeds."""
    ordered = sorted(abs(value) for value in values)
    start = ordered[int((1 - share) * len(ordered))]
    beyond = [value - start for value in ordered if value > start]
    scale = statistics.fmean(beyond)
    return {
        "from": round(start, 3),
        "scale": round(scale, 3),
        "limit_1e_6": round(start + scale * math.log(share / 1e-6), 2),
        "largest": round(ordered[-1], 3),
    }


def interval(differences: Sequence[float]) -> list[float]:
    """95 % by Student's t."""
    critical = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}.get(len(differences), 2.0)
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))
    return [round(mean - critical * error, 4), round(mean + critical * error, 4)]


def summary_of_careers(found: dict[str, Any]) -> dict[str, Any]:
    totals = {name: [sum(one["consumed"]) for one in made] for name, made in found.items()}
    medians = {name: statistics.median(values) for name, values in totals.items()}
    shares = {name: quantile([share for one in made for share in one["shares"]], 0.95) for name, made in found.items()}
    return {
        "median_consumed": max(medians.values()),
        "worst_career": max(medians, key=lambda name: (medians[name], statistics.fmean(totals[name]))),
        "consumed_p95": max(quantile(values, 0.95) for values in totals.values()),
        "consumed_max": max(max(values) for values in totals.values()),
        "share_of_batch_p95": round(max(shares.values()), 3),
        "all_banned": all(one["all_banned"] for made in found.values() for one in made),
        "audited_share": round(statistics.fmean(one["audited"] for made in found.values() for one in made), 3),
        "careers": {
            name: {"median": medians[name], "mean": round(statistics.fmean(totals[name]), 2), "max": max(totals[name]),
                   "share_p95": round(shares[name], 3)}
            for name in found
        },
    }  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    runs: Path = options.runs
    runs.mkdir(parents=True, exist_ok=True)
    limit = demo().training.screening_limit
    held: list[Policies] = []

    def policies() -> Policies:
        if not held:
            held.append(Policies(runs))
        return held[0]

    values: dict[str, list[float]] = {}
    for temperature in TEMPERATURES:
        for version in range(VERSIONS - 1):
            made = piece(
                runs,
                f"honest-{temperature}-{version}",
                lambda t=temperature, v=version: honest(policies(), t, v, options.groups),  # type: ignore[misc]
            )
            for age in AGES:
                values.setdefault(f"{temperature}/{age}", []).extend(made[str(age)])
    everything = [value for cell in values.values() for value in cell]
    found_kinds = piece(runs, "kinds", lambda: kinds(policies()))
    found_careers = {
        f"{kind}, {hostile} keys, {strategy}": piece(
            runs,
            f"career-{kind}-{hostile}-{strategy}",
            lambda k=kind, h=hostile, s=strategy: careers(found_kinds[k], values["1.0/1"], h, s, options.careers),  # type: ignore[misc]
        )
        for kind in KINDS
        for hostile in (1, 3)
        for strategy in STRATEGIES
    }
    result = {
        "honest_groups": len(everything) // len(AGES),
        "honest_statistics": len(everything),
        "honest_withheld": sum(abs(value) > limit for value in everything),
        "screening_limit": limit,
        "honest": {name: tail_fit(cell) for name, cell in values.items()},
        "kinds": {
            kind: {
                "withheld": round(statistics.fmean(abs(value) > limit for value in made["statistics"]), 3),
                "median_statistic": round(statistics.median(made["statistics"]), 1),
                "proven_by_audit": round(statistics.fmean(made["proven"]), 3),
                "logprob_per_token": made["logprob_per_token"],
            }
            for kind, made in found_kinds.items()
        },
        **summary_of_careers(found_careers),
    }
    if options.seeds:
        worst = found_kinds[result["worst_career"].split(",")[0]]
        pairs, at_once = [], []
        for seed in range(options.seeds):
            clean = piece(runs, f"training-{seed}-clean", lambda s=seed: training(s, None))  # type: ignore[misc]
            bad = piece(runs, f"training-{seed}-poisoned", lambda s=seed: training(s, worst))  # type: ignore[misc]
            at_once.append(clean["heldout"][0] - bad["heldout"][0])
            pairs.append(statistics.fmean(clean["heldout"][1:]) - statistics.fmean(bad["heldout"][1:]))
        result |= {
            "heldout_gap": round(statistics.fmean(pairs), 4),
            "heldout_gap_interval": interval(pairs) if len(pairs) > 1 else None,
            "heldout_gaps": [round(pair, 4) for pair in pairs],
            "heldout_gap_at_once": round(statistics.fmean(at_once), 4),
            "heldout_gap_at_once_interval": interval(at_once) if len(pairs) > 1 else None,
            "heldout_seeds": options.seeds,
            "heldout_steps": TRAINED_STEPS,
            "heldout_poisoned_groups": sum(POISONED_STEPS.values()),
        }
    return result | {"machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "poison")
    parser.add_argument("--groups", type=int, default=840, help="honest groups per temperature and version")
    parser.add_argument("--careers", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5, help="trainings with and without poison; 0 leaves them out")
    parser.add_argument("--write", action="store_true", help="store the result in docs/results/poison.json")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = measure(options)
    if options.write:
        write_atomic(ROOT / "docs" / "results" / "poison.json", (json.dumps(result, indent=2) + "\n").encode())
    print(json.dumps(result))


if __name__ == "__main__":
    main()
