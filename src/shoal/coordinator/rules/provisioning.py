"""Which side of a run starves, and what to add: pure, from rates that were observed. `shoal simulate` asks the same functions.

A trainer that is busy for T seconds per step needs G generated groups in that time. A worker of the observed speed makes r of them
per second, so N = G / (T · r) workers keep the trainer from waiting. Their files need validators, and each of them fetches every
version, which the relays send. All rates are of accepted work; claims do not count.
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
FULL = 0.95
"""Share of its time that a validator without a pause is busy."""
MARGIN = 1.1
"""Over the exact number, since workers come and go."""
RELAY_MBIT_S = 1000.0
"""The uplink of a usual server, where that of the relays is not known."""


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
    files_per_step: float = 0.0
    """Submissions that a step took."""
    file_s: float = 0.0
    """What a validator takes for one, its audit included."""
    validators: int = 0
    """That decided something lately."""
    version_bytes: float = 0.0
    """What a follower downloads of a version."""
    relay_mbit_s: float = RELAY_MBIT_S
    """Uplink of one relay."""
    relays: int = 0


@dataclass(frozen=True, slots=True)
class Needs:
    """What keeps the trainer busy; none while a rate is unknown."""

    workers: int | None = None
    validators: int | None = None
    relays: int | None = None
    relays_mbit_s: float | None = None
    """What the relays send, all together."""


@dataclass(frozen=True, slots=True)
class Provision:
    side: Side
    sentence: str
    needs: Needs = Needs()


def needs(rates: Rates) -> Needs:
    """What keeps the trainer busy, from what one step takes."""
    workers, busy_s = workers_needed(rates), rates.step_s - rates.trainer_wait_s
    if workers is None:
        return Needs()
    mbit_s = 8e-6 * workers * rates.version_bytes / busy_s
    checking_s = rates.files_per_step * rates.file_s
    return Needs(
        workers,
        max(1, math.ceil(MARGIN * checking_s / busy_s)) if checking_s > 0 else None,
        max(1, math.ceil(MARGIN * mbit_s / rates.relay_mbit_s)) if mbit_s > 0 else None,
        mbit_s if mbit_s > 0 else None,
    )


def needs_sentence(required: Needs, rates: Rates, async_level: int) -> str:
    """The rule of thumb of a run, in one sentence."""
    if required.workers is None:
        return "What this trainer needs is not known yet."
    return f"To keep this trainer busy at lag {async_level}: {_listed(required, rates)}."


def _listed(required: Needs, rates: Rates) -> str:
    parts = [f"{_number(required.workers, 'worker')} of this speed"]
    if required.validators is not None:
        parts.append(_number(required.validators, "validator"))
    if required.relays is not None:
        parts.append(f"{_number(required.relays, 'relay')} of {rates.relay_mbit_s:,.0f} Mbit/s")
    return ", ".join(parts)


def workers_needed(rates: Rates) -> int | None:
    """Workers of the observed speed that keep the trainer busy; none while a rate is unknown."""
    busy_s = rates.step_s - rates.trainer_wait_s
    if busy_s <= 0 or rates.groups_per_worker_s <= 0 or rates.groups_per_step <= 0:
        return None
    return max(1, math.ceil(MARGIN * rates.groups_per_step / (busy_s * rates.groups_per_worker_s)))


def provision(rates: Rates) -> Provision:
    """Who starves now, in one sentence that says what to add."""
    required, side = needs(rates), _starving(rates)
    return Provision(side, _sentence(side, required, rates), required)


def _starving(rates: Rates) -> Side:
    if rates.step_s <= 0:
        return "unknown"
    if rates.validators_lag_s > BEHIND_STEPS * rates.step_s:
        return "validators"
    if rates.trainer_wait_s > WAITING_SHARE * rates.step_s:
        return "validators" if _are_too_few(rates) else "trainer"
    if rates.workers and rates.workers_fetching > IDLE_SHARE * rates.workers:
        return "weights"
    if rates.workers and rates.workers_waiting > IDLE_SHARE * rates.workers:
        return "workers"
    return "none"


def _are_too_few(rates: Rates) -> bool:
    """Whether the validators, busy all the time, check fewer files than the trainer waits for."""
    return 0 < FULL * rates.validators * rates.step_s <= rates.files_per_step * rates.file_s


def _sentence(side: Side, required: Needs, rates: Rates) -> str:
    needed, has = required.workers, ""
    if needed is not None:
        present = [rates.workers]
        present += [rates.validators] if required.validators is not None else []
        present += [rates.relays] if required.relays is not None else []
        has = f"needs {_listed(required, rates)}, has {', '.join(map(str, present))}"
    if side == "trainer":
        waits = f"The trainer waits {rates.trainer_wait_s / rates.step_s:.0%} of its time for rollouts"
        if needed is not None and needed > rates.workers:
            return f"{waits}: it {has}. Add {_workers(needed - rates.workers)}."
        return f"{waits}, although it {has or 'has workers'}: look for late slots and slow validators."
    if side == "validators":
        return f"Validators are {rates.validators_lag_s:.0f} s behind: add a validator with `shoal validate`.{_so(has)}"
    if side == "weights":
        share = f"{rates.workers_fetching:.0f} of {_workers(rates.workers)}"
        return f"Workers wait for weights ({share}): add a relay near them with `shoal relay`."
    if side == "workers":
        return f"Workers wait for work: the trainer {has or 'is the limit'}. A faster trainer would use the rest."
    if side == "unknown":
        return "Not known yet: the first steps are still being measured."
    return f"Nobody waits for long: the trainer {has}." if has else "Nobody waits for long."


def _so(has: str) -> str:
    return f" The trainer {has}." if has else ""


def _workers(number: int) -> str:
    return _number(number, "worker")


def _number(number: int | None, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
