"""What engine a worker has, from its leases and files: rows, speed, and the time that a file takes to arrive after its last sample.

`replayed_engine` puts the samples of every file that was read into the rows of a guessed engine, from the moment of the lease on,
and compares when the slots end with when the files arrived. Lengths differ from slot to slot, so speed and delivery can be
separated: time that grows with the lengths is the engine's, the rest is scoring, writing, uploading, and waiting for a processor.
`fitted_engine` does without lengths of single slots, and counts all of that time as the engine's.
"""

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

ROWS = tuple(2**power for power in range(11))
FITTED_SLOTS = 24
FEWEST_REPLAYED = 6
SWAP_S = 0.05
FASTEST, SLOWEST = 1 / 16, 1.25
"""Times per token to try, over that of an engine which alone takes all the time between lease and file."""
TRIED = 32
NARROWED = 16
DELIVERY_COUNTS = 0.02
"""Of a second of error; where all slots are equally long, only this tells a slow engine from a slow delivery."""


@dataclass(frozen=True, slots=True)
class Work:
    """One file and its lease."""

    issued_at: float
    received_at: float
    version: int
    lengths: Sequence[int]
    """Of its samples, in the order in which they entered the engine."""


@dataclass(frozen=True, slots=True)
class EngineFit:
    rows: int
    tokens_per_s: float
    deliver_s: float = 0.0


def replayed_engine(work: Sequence[Work]) -> EngineFit | None:
    """The engine whose slots end when the files say; none if too few files were read."""
    if len(work) < FEWEST_REPLAYED:
        return None
    work = sorted(work, key=lambda one: one.issued_at)
    alone = sum(sum(one.lengths) for one in work) / max(
        1e-6, covered_s([(one.issued_at, one.received_at) for one in work])
    )
    best, best_error = None, math.inf
    for rows in ROWS[: _most_rows(work)]:
        token_s, error, deliver_s = _best_speed(work, rows, rows / alone)
        if error < best_error * 0.99:
            best, best_error = EngineFit(rows, rows / token_s, deliver_s), error
    return best


def _most_rows(work: Sequence[Work]) -> int:
    """Of `ROWS`: no engine shows more rows than the samples that were leased at once."""
    held, ends = 0, list[float]()
    for one in work:
        ends = [end for end in ends if end > one.issued_at] + [one.received_at]
        held = max(held, len(ends))
    samples = held * max(len(one.lengths) for one in work)
    return 1 + next((place for place, rows in enumerate(ROWS) if rows >= samples), len(ROWS))


def _best_speed(work: Sequence[Work], rows: int, token_s: float) -> tuple[float, float, float]:
    """Time per token, error and delivery of the best engine with this number of rows."""
    factor = (SLOWEST / FASTEST) ** (1 / TRIED)
    tries = [token_s * FASTEST * factor**place for place in range(TRIED + 1)]
    found = min((_error(work, rows, one), one) for one in tries)
    low, high = found[1] / factor, found[1] * factor
    for _ in range(NARROWED):
        left, right = low ** (2 / 3) * high ** (1 / 3), low ** (1 / 3) * high ** (2 / 3)
        if _error(work, rows, left) < _error(work, rows, right):
            high = right
        else:
            low = left
    error, deliver_s = _error(work, rows, low)
    return low, error, deliver_s


def _error(work: Sequence[Work], rows: int, token_s: float) -> tuple[float, float]:
    """Mean error of the arrivals, and the delivery that makes it least."""
    left = [one.received_at - end for one, end in zip(work, _ends(work, rows, token_s), strict=True)]
    deliver_s = max(0.0, median(left))
    return fmean(abs(one - deliver_s) for one in left) + DELIVERY_COUNTS * deliver_s, deliver_s


def _ends(work: Sequence[Work], rows: int, token_s: float) -> list[float]:
    """When each slot ends; weights are swapped in an empty engine."""
    free, busy_until, version, ends = [-math.inf] * rows, -math.inf, work[0].version, list[float]()
    for one in work:
        begins_at, ends_at = one.issued_at, one.issued_at
        if one.version != version:
            begins_at, version = max(begins_at, busy_until) + SWAP_S, one.version
        for length in one.lengths:
            ended_at = max(begins_at, free[0]) + length * token_s
            heapq.heapreplace(free, ended_at)
            ends_at = max(ends_at, ended_at)
        busy_until = max(busy_until, ends_at)
        ends.append(ends_at)
    return ends


def covered_s(spans: Sequence[tuple[float, float]]) -> float:
    """The time in which at least one lease was held."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def fitted_engine(lengths: Sequence[int], samples: int, tokens_per_s: float, slot_s: float) -> EngineFit:
    """Rows, and the speed with all of them busy, that give the observed speed and time of a slot."""
    best, best_error = EngineFit(1, tokens_per_s), math.inf
    for rows in ROWS:
        speed = tokens_per_s
        for _ in range(3):  # the speed of a full engine is a little above the observed one
            seen_speed, seen_slot_s = engine_alone(lengths, samples, rows, speed)
            speed *= tokens_per_s / seen_speed
        error = abs(math.log(seen_slot_s / slot_s))
        if error < best_error - 1e-3:
            best, best_error = EngineFit(rows, speed), error
    return best


def engine_alone(lengths: Sequence[int], samples: int, rows: int, tokens_per_s: float) -> tuple[float, float]:
    """Speed and mean time of a slot of an engine that is fed whenever a row is free."""
    chance, token_s = random.Random(0), rows / tokens_per_s
    free, tokens, total_s, ends = [0.0] * rows, 0, 0.0, 0.0
    for _ in range(max(FITTED_SLOTS, 4 * rows // samples)):
        asked_at, slot_ends = free[0], 0.0
        for _ in range(samples):
            length = chance.choice(lengths)
            ended_at = heapq.heappop(free) + length * token_s
            heapq.heappush(free, ended_at)
            tokens, slot_ends = tokens + length, max(slot_ends, ended_at)
        total_s, ends = total_s + slot_ends - asked_at, max(ends, slot_ends)
    return tokens / ends, total_s / max(FITTED_SLOTS, 4 * rows // samples)
