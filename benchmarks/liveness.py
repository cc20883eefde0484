"""How much keys that misbehave without forging slow a run down.

    python benchmarks/liveness.py [--steps 30] [--seeds 3] [--processes 2] [--pieces DIR] [--no-real]

On an event clock with the coordinator's rules: each attack of `simulation/attacks.py` is run by one key beside 8 honest ones, by 4
beside 8 (a third of the keys) and by 8 beside 4. A ratio is steps per minute with the attack over steps per minute of the same
honest keys alone, each averaged over the seeds. `unequal_ratio` compares honest keys of speeds 1, 1, 1, 1/3, 1/10 and one that
pauses with the same swarm without the slow ones; `length_p` and `reward_p` compare its trained groups with those of a run in which
no slot is late, so that there are no backups (Mann-Whitney, two-sided). The rules run on tables in memory; every tenth simulation
is repeated with the coordinator's store and must end the same, or the benchmark fails.

With real processes: two honest workers of the bundled policy, with and without a key that leases and never submits, in phases that
alternate; `real_ratio` is the median over pairs of neighbouring phases.

With --pieces every finished simulation and phase is kept there, and a further run of the same code begins where the last one ended.
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from shoal.config import ShoalConfig, build_config
from shoal.files import digest_bytes, write_atomic
from shoal.simulation import (
    MemoryCoordinator,
    Scenario,
    Work,
    WorkerPlan,
    attacks,
    honest,
    hostile,
    simulate,
    unequal,
)

ROOT = Path(__file__).resolve().parent.parent
WORK = Work(seconds=4.0, spread=0.2)
SWARMS = {"one": (8, 1), "third": (8, 4), "majority": (4, 8)}
CHECKED_EVERY = 10
CODE = ("src/shoal/coordinator", "src/shoal/simulation", "benchmarks/liveness.py")


def config() -> ShoalConfig:
    return build_config(
        {
            "run": {"steps": 10_000},
            "rollouts": {"group_size": 2, "tasks_per_slot": 2, "max_prompt_tokens": 16, "max_new_tokens": 64},
            "training": {"async_level": 2, "groups_per_step": 8},
            "coordinator": {"lease_s": 60},
            "trust": {"stake_tokens": 100_000},
        }
    )


class Pieces:
    """Results by name, on disk if there is a directory; those of other code are not used."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = None if directory is None else directory / code_digest()
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)

    def known(self, name: str) -> object | None:
        path = self._path(name)
        return json.loads(path.read_text()) if path is not None and path.exists() else None

    def keep(self, name: str, result: object) -> None:
        print(json.dumps({name: result}), file=sys.stderr, flush=True)
        path = self._path(name)
        if path is not None:
            write_atomic(path, json.dumps(result).encode())

    def _path(self, name: str) -> Path | None:
        return None if self.directory is None else self.directory / f"{digest_bytes(name.encode())[:16]}.json"


def code_digest() -> str:
    files = sorted(file for place in CODE for file in [ROOT / place, *(ROOT / place).rglob("*.py")] if file.is_file())
    return digest_bytes(b"".join(file.read_bytes() for file in files))[:16]


def scenario(workers: Sequence[WorkerPlan], steps: int, seed: int, work: Work = WORK) -> Scenario:
    return Scenario(config=config(), workers=workers, work=work, steps=steps, seed=seed)


def rate(workers: Sequence[WorkerPlan], steps: int, seed: int, checked: bool = False) -> float:
    """Steps per minute; what was not reached in time counts as a standstill from there on."""
    plan = scenario(workers, steps, seed)
    outcome = simulate(plan, MemoryCoordinator)
    if checked and simulate(plan) != outcome:
        raise AssertionError(f"the store decides otherwise than the rules in memory: {plan}")
    return 60 * len(outcome.formed_at) / (outcome.seconds if len(outcome.formed_at) == steps else plan.longest_s)


def fairness(steps: int, seed: int) -> dict[str, float]:
    mixed = simulate(scenario([*honest(3), *unequal()], steps, seed), MemoryCoordinator)
    alone = simulate(scenario(honest(3), steps, seed), MemoryCoordinator)
    calm = simulate(scenario(honest(6), steps, seed + 1000, replace(WORK, takes_longer=False)), MemoryCoordinator)
    return {
        "ratio": mixed.steps_per_minute / alone.steps_per_minute,
        "length_p": mann_whitney_p(mixed.lengths, calm.lengths),
        "reward_p": mann_whitney_p(mixed.rewards, calm.rewards),
    }


def mann_whitney_p(left: Sequence[float], right: Sequence[float]) -> float:
    """Two-sided p by the normal approximation with ties."""
    pooled = sorted([(value, 0) for value in left] + [(value, 1) for value in right])
    ranks, ties, start = 0.0, 0.0, 0
    while start < len(pooled):
        end = start
        while end < len(pooled) and pooled[end][0] == pooled[start][0]:
            end += 1
        same, mean_rank = end - start, (start + end + 1) / 2
        ranks += mean_rank * sum(side == 0 for _, side in pooled[start:end])
        ties += same**3 - same
        start = end
    n, m = len(left), len(right)
    mean = n * (n + m + 1) / 2
    variance = n * m / 12 * ((n + m + 1) - ties / ((n + m) * (n + m - 1)))
    return math.erfc(abs(ranks - mean) / math.sqrt(2 * variance)) if variance else 1.0


Call = tuple[Callable[..., object], tuple[object, ...]]


def simulated(steps: int, seeds: int, processes: int, pieces: Pieces) -> dict[str, object]:
    calls = simulations(steps, seeds)
    results = {name: known for name in calls if (known := pieces.known(name)) is not None}
    with ProcessPoolExecutor(processes) as pool:
        missing: dict[str, Future[object]] = {
            name: pool.submit(function, *arguments)
            for name, (function, arguments) in calls.items()
            if name not in results
        }
        for name, found in missing.items():
            results[name] = found.result()
            pieces.keep(name, results[name])
    return summary(results, steps, seeds)


def simulations(steps: int, seeds: int) -> dict[str, Call]:
    calls: dict[str, Call] = {}
    for seed in range(seeds):
        calls[f"fairness {2 * steps} {seed}"] = (fairness, (2 * steps, seed))
        for good in {good for good, _ in SWARMS.values()}:
            calls[f"alone {good} {steps} {seed}"] = (rate, (honest(good), steps, seed))
        for swarm, (good, bad) in SWARMS.items():
            for name, behaviour in attacks().items():
                workers = [*honest(good), *hostile(bad, behaviour)]
                checked = len(calls) % CHECKED_EVERY == 0
                calls[f"{swarm}, {name}, {steps} {seed}"] = (rate, (workers, steps, seed, checked))
    return calls


def summary(results: Mapping[str, object], steps: int, seeds: int) -> dict[str, object]:
    def mean(name: str) -> float:
        return statistics.fmean(float(str(results[f"{name} {steps} {seed}"])) for seed in range(seeds))

    ratios = {
        swarm: {name: round(mean(f"{swarm}, {name},") / mean(f"alone {good}"), 3) for name in attacks()}
        for swarm, (good, _) in SWARMS.items()
    }
    fair = [results[f"fairness {2 * steps} {seed}"] for seed in range(seeds)]

    def median(field: str) -> float:
        return round(statistics.median(float(one[field]) for one in fair if isinstance(one, dict)), 3)

    return {
        "steps": steps,
        "seeds": seeds,
        "simulations": len(results),
        "checked_with_store": sum(
            len(call[1]) == 4 and call[1][3] is True for call in simulations(steps, seeds).values()
        ),
        "attacks": ratios,
        "worst_ratio": min(ratios["one"].values()),
        "worst_ratio_third_hostile": min(ratios["third"].values()),
        "worst_ratio_majority": min(ratios["majority"].values()),
        "worst_attacks": {swarm: min(found, key=lambda name: found[name]) for swarm, found in ratios.items()},
        "unequal_ratio": median("ratio"),
        "length_p": median("length_p"),
        "reward_p": median("reward_p"),
    }


def real(pairs: int, steps: int, pieces: Pieces) -> dict[str, object]:
    """Phases of real processes; a swarm that is started again goes on with the pairs that are missing."""
    sys.path.insert(0, str(ROOT / "tests"))
    from end_to_end.staller import honest_swarm, pair

    found = [known for number in range(pairs) if (known := pieces.known(f"real {steps} {number}")) is not None]
    if len(found) < pairs:
        with tempfile.TemporaryDirectory() as directory, honest_swarm(Path(directory) / "run") as running:
            for number in range(len(found), pairs):
                phases = [asdict(phase) for phase in pair(running, steps, staller_first=number % 2 == 1)]
                pieces.keep(f"real {steps} {number}", phases)
                found.append(phases)
    ratios = [_ratio(phases) for phases in found if isinstance(phases, list)]
    return {
        "real_ratio": round(statistics.median(ratios), 3),
        "real_ratios": [round(ratio, 3) for ratio in ratios],
        "real_phases": found,
    }


def _ratio(phases: Sequence[Mapping[str, float]]) -> float:
    rates = {bool(phase["with_staller"]): phase["steps"] / phase["seconds"] for phase in phases}
    return rates[True] / rates[False]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="of each simulation")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5, help="of real phases")
    parser.add_argument("--real-steps", type=int, default=10, help="of each real phase")
    parser.add_argument("--no-real", action="store_true", help="leave out the phases of real processes")
    parser.add_argument("--no-simulation", action="store_true", help="only the phases of real processes")
    parser.add_argument("--pieces", type=Path, help="directory for finished pieces, to resume from")
    options = parser.parse_args()
    pieces = Pieces(options.pieces)
    result: dict[str, object] = {"machine": f"{os.cpu_count()} cores, {platform.machine()}"}
    if not options.no_simulation:
        result |= simulated(options.steps, options.seeds, options.processes, pieces)
    if not options.no_real:
        result |= real(options.pairs, options.real_steps, pieces)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
