"""How much poison a run trains on when keys that earned the audit floor turn hostile.

    python benchmarks/poison.py [--runs build/poison] [--careers 30] [--seeds 5] [--pieces N]

The demo's recipe (bundled policy, 8 groups per slot, batches of 32) gives real policy versions. `honest`: the trainer's statistic
of honest groups at ages 0 to 2 and three temperatures. `kinds`: poisoned groups of five kinds, each with the trainer's statistic
and the verdict of a real audit. `careers`: the coordinator's own code with 8 honest keys and 1 or 3 hostile ones, all at the floor.
Hostile keys forge all groups of a file (`all`), only as many useful ones as one key may have without an audit (`share`), a single
one (`one`), two (`pair`), two when all of them hold a slot at once (`together`), or all useful ones of just those files that have
no more than one key may have without an audit (`patient`); the worst counts. `median_consumed` is per key, `_together` of all
hostile keys. `honest_audited`: what the limits on unaudited groups cost 8 honest keys at the floor, with other shares, and with the
limit per key alone. `heldout`: real trainings without poison, with eight groups, and with as many groups as the median of the worst
careers consumed together, in a row. Every piece is a file in `--runs`, so an interrupted benchmark goes on where it was; the report
says what is missing.
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

from benchmarks.poisoning.careers import STRATEGIES, careers, honest_audited  # noqa: E402
from benchmarks.poisoning.forgeries import KINDS, kinds  # noqa: E402
from benchmarks.poisoning.policies import AGES, VERSIONS, Policies, honest  # noqa: E402
from benchmarks.poisoning.recipe import demo  # noqa: E402
from benchmarks.poisoning.trainings import ONE_KEY, TRAINED_STEPS, schedule, training  # noqa: E402
from shoal.files import write_atomic  # noqa: E402

TEMPERATURES = (0.6, 1.0, 1.3)
SHARES = (0.04, 0.1, 0.2, 1.0)
"""Of a batch without an audit; the second is the default, the last leaves it to the draw."""


class Pieces:
    """Results by name in a directory; makes at most a stated number of new ones."""

    def __init__(self, directory: Path, most: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.left, self.missing = directory, most, 0

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """None if it may not be made any more."""
        path = self.directory / f"{name}.json"
        if not path.exists() and self.left <= 0:
            self.missing += 1
            return None
        if not path.exists():
            self.left -= 1
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
    each = {name: summary_of_career(made) for name, made in found.items()}

    def worst(field: str) -> float:
        return max(one[field] for one in each.values())

    return {
        "median_consumed": worst("median_of_key"),
        "median_consumed_together": worst("median"),
        "worst_career": max(each, key=lambda name: (each[name]["median"], each[name]["mean"])),
        "consumed_p95": worst("p95_of_key"),
        "consumed_max": worst("max_of_key"),
        "share_of_batch_p95": worst("share_p95"),
        "share_of_key_p95": worst("share_of_key_p95"),
        "all_banned": all(one["all_banned"] for made in found.values() for one in made),
        "audited_share": round(statistics.fmean(one["audited"] for made in found.values() for one in made), 3),
        "careers": each,
    }


def summary_of_career(made: Sequence[dict[str, Any]]) -> dict[str, float]:
    together, by_key = [sum(one["consumed"]) for one in made], [count for one in made for count in one["consumed"]]
    return {
        "median_of_key": statistics.median(by_key),
        "p95_of_key": quantile(by_key, 0.95),
        "max_of_key": max(by_key),
        "median": statistics.median(together),
        "mean": round(statistics.fmean(together), 2),
        "max": max(together),
        "share_p95": round(quantile([share for one in made for share in one["shares"]], 0.95), 3),
        "share_of_key_p95": round(quantile([share for one in made for share in one["key_shares"]], 0.95), 3),
        "audited_share": round(statistics.fmean(one["audited"] for one in made), 3),
    }


def median_career(made: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return sorted(made, key=lambda one: sum(one["consumed"]))[len(made) // 2]


def summary_of_gaps(gaps: Sequence[float]) -> dict[str, Any]:
    return {
        "gap": round(statistics.fmean(gaps), 4),
        "interval": interval(gaps),
        "gaps": [round(gap, 4) for gap in gaps],
        "seeds": len(gaps),
    }


class Measurement:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.pieces = Pieces(options.runs, options.pieces)
        self.limit = demo().training.screening_limit
        self._policies: Policies | None = None
        self.values: dict[str, list[float]] = {f"{t}/{age}": [] for t in TEMPERATURES for age in AGES}

    def policies(self) -> Policies:
        self._policies = self._policies or Policies(self.options.runs)
        return self._policies

    def run(self) -> dict[str, Any]:
        self._honest(0)
        typical = list(self.values["1.0/1"])
        found = self.pieces.get("kinds", lambda: kinds(self.policies()))
        of_careers = self._careers(found, typical) if found is not None and typical else {}
        for chunk in range(1, self.options.chunks):
            self._honest(chunk)
        everything = [value for cell in self.values.values() for value in cell]
        result = {
            "honest_groups": len(everything) // len(AGES),
            "honest_statistics": len(everything),
            "honest_withheld": sum(abs(value) > self.limit for value in everything),
            "screening_limit": self.limit,
            "honest": {name: tail_fit(cell) for name, cell in self.values.items() if len(cell) > 100},
            "kinds": {kind: self._kind(made) for kind, made in (found or {}).items()},
            **(summary_of_careers(of_careers) if of_careers else {}),
        }
        if of_careers:
            worst = result["worst_career"]
            result |= self._honest_audited()
            result |= self._trainings(found[worst.split(",")[0]], schedule(median_career(of_careers[worst])))
        machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        return {
            "complete": not self.pieces.missing,
            "missing_pieces": self.pieces.missing,
            **result,
            "machine": machine,
        }

    def _honest(self, chunk: int) -> None:
        """A chunk of every temperature and version, so that a part of the benchmark covers all of them."""
        for temperature in TEMPERATURES:
            for version in range(VERSIONS - 1):
                made = self.pieces.get(
                    f"honest-{temperature}-{version}-{chunk}",
                    lambda t=temperature, v=version: honest(self.policies(), t, v, chunk, self.options.groups),  # type: ignore[misc]
                )
                for age in AGES:
                    self.values[f"{temperature}/{age}"] += [] if made is None else made[str(age)]

    def _kind(self, made: dict[str, Any]) -> dict[str, Any]:
        return {
            "withheld": round(statistics.fmean(abs(value) > self.limit for value in made["statistics"]), 3),
            "median_statistic": round(statistics.median(made["statistics"]), 1),
            "proven_by_audit": round(statistics.fmean(made["proven"]), 3),
            "logprob_per_token": made["logprob_per_token"],
        }

    def _careers(self, found: dict[str, Any], typical: Sequence[float]) -> dict[str, Any]:
        made = {
            f"{kind}, {hostile} keys, {strategy}": self.pieces.get(
                f"career-{kind}-{hostile}-{strategy}",
                lambda k=kind, h=hostile, s=strategy: careers(found[k], typical, h, s, self.options.careers),  # type: ignore[misc]
            )
            for kind in KINDS
            for hostile in (1, 3)
            for strategy in STRATEGIES
        }
        return {name: one for name, one in made.items() if one is not None}

    def _honest_audited(self) -> dict[str, Any]:
        """Share of the useful groups of honest keys that is audited."""
        made = {str(share): self.pieces.get(f"audited-{share}", lambda s=share: honest_audited(s)) for share in SHARES}  # type: ignore[misc]
        made["0.1, per key only"] = self.pieces.get("audited-per-key", lambda: honest_audited(0.1, per_key_only=True))
        return {"honest_audited": made}

    def _trainings(self, worst: dict[str, Any], together: Sequence[int]) -> dict[str, Any]:
        gaps: dict[str, list[float]] = {"one_key": [], "at_once": [], "together": []}
        for seed in range(self.options.seeds):
            clean = self.pieces.get(f"training-{seed}-clean", lambda s=seed: training(s, None))  # type: ignore[misc]
            for name, counts in (("one_key", ONE_KEY), ("together", tuple(together))):
                piece = f"training-{seed}-poisoned" if name == "one_key" else f"training-{seed}-{sum(counts)}-poisoned"
                bad = self.pieces.get(piece, lambda s=seed, c=counts: training(s, worst, c))  # type: ignore[misc]
                if clean is None or bad is None:
                    continue
                gaps[name].append(statistics.fmean(clean["heldout"][1:]) - statistics.fmean(bad["heldout"][1:]))
                if name == "one_key":
                    gaps["at_once"].append(clean["heldout"][0] - bad["heldout"][0])
        known = {name: summary_of_gaps(found) for name, found in gaps.items() if len(found) > 1}
        poisoned = {"one_key": list(ONE_KEY), "together": list(together)}
        return {"heldout": known, "heldout_steps": TRAINED_STEPS, "heldout_poisoned_groups": poisoned} | (
            {"heldout_gap": known["one_key"]["gap"], "heldout_gap_interval": known["one_key"]["interval"]}
            if "one_key" in known
            else {}
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "poison")
    parser.add_argument("--groups", type=int, default=105, help="honest ones of a chunk, per temperature and version")
    parser.add_argument("--chunks", type=int, default=8, help="of honest groups")
    parser.add_argument("--pieces", type=int, default=1 << 30, help="make at most this many new pieces, then report")
    parser.add_argument("--careers", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5, help="trainings with and without poison; 0 leaves them out")
    parser.add_argument("--write", action="store_true", help="store the result in docs/results/poison.json")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = Measurement(options).run()
    if options.write:
        write_atomic(ROOT / "docs" / "results" / "poison.json", (json.dumps(result, indent=2) + "\n").encode())
    print(json.dumps(result))


if __name__ == "__main__":
    main()
