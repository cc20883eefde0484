"""Which side of a run starves, and what to add: pure, from rates that were observed. `shoal simulate` asks the same functions.

A trainer that is busy for T seconds per step needs G generated groups in that time. A worker of the observed speed makes r of them
per second, so N = G / (T · r) workers keep the trainer from waiting. All rates are of accepted work; claims do not count.
"""

import math
from dataclasses import dataclass
from typing import Literal

Side = Literal["none", "trainer", "workers", "validators", "weights", "unknown"]
"""Who waits: the trainer for rollouts, workers for work or for weights; `validators` are behind."""

WAITING_SHARE = 0.15
"""Of the time of a step; below, waiting is part of every step."""
IDLE_SHARE = 0.5
"""Of the workers present that wait on average."""
BEHIND_STEPS = 1.0
"""Submissions that wait for a verdict for longer than this many steps hold up batches."""
MARGIN = 1.1
"""Over the exact number, since workers come and go."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the last steps were like."""

    groups_per_step: float = 0.0
    """Generated groups that a step took, with those that carry no signal."""
    step_s: float = 0.0
    trainer_wait_s: float = 0.0
    """Of each step, for its batch."""
    groups_per_worker_s: float = 0.0
    """Accepted groups per second of one working worker."""
    workers: int = 0
    """Present."""
    workers_waiting: float = 0.0
    """Mean number of them that wait for work or for the trainer."""
    workers_fetching: float = 0.0
    """For weights."""
    validators_lag_s: float = 0.0
    """Age of the oldest submission without a verdict."""


@dataclass(frozen=True, slots=True)
class Provision:
    side: Side
    sentence: str
    workers_needed: int | None = None
    workers_present: int = 0


def workers_needed(rates: Rates) -> int | None:
    """Workers of the observed speed that keep the trainer busy; none while a rate is unknown."""
    busy_s = rates.step_s - rates.trainer_wait_s
    if busy_s <= 0 or rates.groups_per_worker_s <= 0 or rates.groups_per_step <= 0:
        return None
    return max(1, math.ceil(MARGIN * rates.groups_per_step / (busy_s * rates.groups_per_worker_s)))


def provision(rates: Rates) -> Provision:
    """Who starves now, in one sentence that says what to add."""
    needed, side = workers_needed(rates), _starving(rates)
    return Provision(side, _sentence(side, needed, rates), needed, rates.workers)


def _starving(rates: Rates) -> Side:
    if rates.step_s <= 0:
        return "unknown"
    if rates.validators_lag_s > BEHIND_STEPS * rates.step_s:
        return "validators"
    if rates.trainer_wait_s > WAITING_SHARE * rates.step_s:
        return "trainer"
    if rates.workers and rates.workers_fetching > IDLE_SHARE * rates.workers:
        return "weights"
    if rates.workers and rates.workers_waiting > IDLE_SHARE * rates.workers:
        return "workers"
    return "none"


def _sentence(side: Side, needed: int | None, rates: Rates) -> str:
    has = f"needs {_workers(needed)} of this speed, has {rates.workers}" if needed is not None else ""
    if side == "trainer":
        waits = f"The trainer waits {rates.trainer_wait_s / rates.step_s:.0%} of its time for rollouts"
        if needed is not None and needed > rates.workers:
            return f"{waits}: it {has}. Add {_workers(needed - rates.workers)}."
        return f"{waits}, although it {has or 'has workers'}: look for late slots and slow validators."
    if side == "validators":
        return f"Validators are {rates.validators_lag_s:.0f} s behind: add a validator with `shoal validate`."
    if side == "weights":
        share = f"{rates.workers_fetching:.0f} of {_workers(rates.workers)}"
        return f"Workers wait for weights ({share}): add a relay near them with `shoal relay`."
    if side == "workers":
        return f"Workers wait for work: the trainer {has or 'is the limit'}. A faster trainer would use the rest."
    if side == "unknown":
        return "Not known yet: the first steps are still being measured."
    return f"Nobody waits for long: the trainer {has}." if has else "Nobody waits for long."


def _workers(number: int | None) -> str:
    return f"{number} worker" if number == 1 else f"{number} workers"
