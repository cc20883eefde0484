"""The list of attacks on liveness: every way to misbehave that is not a forgery, with every pattern that makes sense for it.

`benchmarks/liveness.py` measures all of them. A new way to hold up a run is added here.
"""

from collections.abc import Sequence

from shoal.simulation.scenario import WorkerPlan
from shoal.simulation.workers import Attack, Behaviour

EARNED = 12
"""Deliveries after which a key has its place."""
FAILING: tuple[Attack, ...] = ("stall", "return_late", "junk_late", "junk")
"""The lease comes to nothing."""
SLOW: tuple[Attack, ...] = ("just_in_time", "just_late")


def attacks() -> dict[str, Behaviour]:
    found = {f"{attack}, {name}": made for attack in FAILING for name, made in _failing(attack).items()}
    found |= {f"{attack}, {name}": made for attack in SLOW for name, made in _patterns(attack).items()}
    found |= {f"{attack}, new key each time": Behaviour(attack, renews=True) for attack in (*FAILING, "junk_at_once")}
    return found | {
        "stall, claims to be fast": Behaviour("stall", claims_tokens_per_s=9e8),
        "stall, claims to be slow": Behaviour("stall", claims_tokens_per_s=5.0),
        "stall, earned, new key each time": Behaviour("stall", after=4, renews=True),
        "return, always": Behaviour("return"),
        "return, new key each time": Behaviour("return", renews=True),
        "old_version, always": Behaviour("old_version"),
        "idle, earned first": Behaviour("idle", after=EARNED),
    }


def _patterns(attack: Attack) -> dict[str, Behaviour]:
    return {
        "always": Behaviour(attack),
        "every second": Behaviour(attack, every=2),
        "every tenth": Behaviour(attack, every=10),
        "while counted on": Behaviour(attack, when_reliable=True),
        "together": Behaviour(attack, after=4, every_step=5),
    }


def _failing(attack: Attack) -> dict[str, Behaviour]:
    return _patterns(attack) | {
        "earned first": Behaviour(attack, after=EARNED),
        "earned, every tenth": Behaviour(attack, after=EARNED, every=10),
        "backups only": Behaviour(attack, after=10, with_backups_only=True),
    }


def honest(count: int) -> list[WorkerPlan]:
    return [WorkerPlan(f"honest-{number}") for number in range(count)]


def hostile(count: int, behaviour: Behaviour) -> list[WorkerPlan]:
    return [WorkerPlan(f"hostile-{number}", behaviour=behaviour) for number in range(count)]


def unequal() -> Sequence[WorkerPlan]:
    """Honest keys that are slower than the rest, and one whose machine is busy at times."""
    return [
        WorkerPlan("third", speed=1 / 3),
        WorkerPlan("tenth", speed=1 / 10),
        WorkerPlan("pausing", pauses=(40, 15)),
    ]
