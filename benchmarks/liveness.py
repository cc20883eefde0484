"""How much keys that misbehave without forging slow a run down: the coordinator's code on an event clock.

    python benchmarks/liveness.py [--steps 30] [--processes 2]

Each attack is run by one key beside 8 honest ones, by 4 beside 8 (a third of the keys) and by 8 beside 4: with every lease, every
second, every tenth, after 12 honest deliveries, and only with slots that another key had first. A ratio is steps per minute with
the attack over steps per minute of the same honest keys alone. `unequal_ratio` compares honest keys of speeds 1, 1, 1, 1/3, 1/10
and one that pauses with the same swarm without the slow ones; `length_p` and `reward_p` compare its trained groups with those of a
run in which no slot is late, so that there are no backups (Mann-Whitney, two-sided).
"""

import argparse
import json
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from shoal.config import ShoalConfig, build_config
from shoal.simulation import Behaviour, Scenario, Work, WorkerPlan, simulate

WORK = Work(seconds=4.0, spread=0.2)
ATTACKS = ("stall", "return_late", "junk_late", "junk", "just_in_time")
PATTERNS: dict[str, dict[str, int | bool]] = {
    "always": {},
    "every second": {"every": 2},
    "every tenth": {"every": 10},
    "earned first": {"after": 12},
    "earned, every tenth": {"after": 12, "every": 10},
    "backups only": {"after": 10, "with_backups_only": True},
}
SWARMS = {"one": (8, 1), "third": (8, 4), "majority": (4, 8)}


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


def scenario(workers: Sequence[WorkerPlan], steps: int, work: Work = WORK, seed: int = 0) -> Scenario:
    return Scenario(config=config(), workers=workers, work=work, steps=steps, seed=seed)


def honest(count: int) -> list[WorkerPlan]:
    return [WorkerPlan(f"honest-{number}") for number in range(count)]


def hostile(count: int, behaviour: Behaviour) -> list[WorkerPlan]:
    return [WorkerPlan(f"hostile-{number}", behaviour=behaviour) for number in range(count)]


def attacks() -> dict[str, Behaviour]:
    found = {
        f"{attack}, {name}": Behaviour(attack=attack, **pattern)  # type: ignore[arg-type]
        for attack in ATTACKS
        for name, pattern in PATTERNS.items()
    }
    found["stall, claims to be fast"] = Behaviour(attack="stall", claims_tokens_per_s=9e8)
    found["stall, claims to be slow"] = Behaviour(attack="stall", claims_tokens_per_s=5.0)
    return found


def rate(plan: Scenario) -> float:
    return simulate(plan).steps_per_minute


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


def unequal(steps: int) -> dict[str, float]:
    fast = honest(3)
    slow = [WorkerPlan("third", speed=1 / 3), WorkerPlan("tenth", speed=1 / 10), WorkerPlan("pausing", pauses=(40, 15))]
    mixed, alone = simulate(scenario([*fast, *slow], steps)), simulate(scenario(fast, steps))
    calm = simulate(scenario(honest(6), steps, replace(WORK, takes_longer=False), seed=1))
    return {
        "unequal_ratio": round(mixed.steps_per_minute / alone.steps_per_minute, 3),
        "length_p": round(mann_whitney_p(mixed.lengths, calm.lengths), 3),
        "reward_p": round(mann_whitney_p(mixed.rewards, calm.rewards), 3),
    }


def measure(steps: int, processes: int) -> dict[str, object]:
    with ProcessPoolExecutor(processes) as pool:
        fairness = pool.submit(unequal, 2 * steps)
        alone = {count: pool.submit(rate, scenario(honest(count), steps)) for count, _ in SWARMS.values()}
        rates = {
            (swarm, name): pool.submit(rate, scenario([*honest(good), *hostile(bad, behaviour)], steps))
            for swarm, (good, bad) in SWARMS.items()
            for name, behaviour in attacks().items()
        }
        ratios: dict[str, dict[str, float]] = {swarm: {} for swarm in SWARMS}
        for (swarm, name), found in rates.items():
            ratios[swarm][name] = round(found.result() / alone[SWARMS[swarm][0]].result(), 3)
            print(json.dumps({"swarm": swarm, "attack": name, "ratio": ratios[swarm][name]}), flush=True)
        return {
            "steps": steps,
            "attacks": ratios,
            "worst_ratio": min(ratios["one"].values()),
            "worst_ratio_third_hostile": min(ratios["third"].values()),
            "worst_ratio_majority": min(ratios["majority"].values()),
            **fairness.result(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    print(json.dumps(measure(options.steps, options.processes)))


if __name__ == "__main__":
    main()
