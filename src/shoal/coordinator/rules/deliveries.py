"""Who delivers in time: the record of a key, the pace of the swarm, and what follows for leases. Pure.

Every lease ends in one outcome: a file that was accepted, in time or late, or a failure (given back, expired, abandoned, rejected).
A key that mostly delivers in time is *reliable*: only slots of reliable keys hold up a batch. In time means close to the median
over keys, so no minority of keys moves it. Nothing here depends on what a key says about itself, and a bad record is repaired by
work.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

MEMORY = 32
"""Outcomes that a record remembers: each new one makes the earlier ones count less by one part in this number."""
KEEP = 1 - 1 / MEMORY
FEWEST_IN_TIME = 2.8
"""Three deliveries in time, the older ones with their faded weight."""
MISSED_SHARE = 0.1
"""A reliable key misses no more, or twice what the median key misses: where lengths vary much, everybody is late at times."""
ENFORCED_SHARE = 3
"""Reliability counts once reliable keys make one in this number of the deliveries in time; before, every key counts as reliable."""
IN_TIME = 1.5
"""Times the median of the swarm."""
IN_TIME_SLACK_S = 0.5
LEASE_MARGIN = 4.0
"""A lease lasts this many times the expected work: a laptop that is also used for something else still makes it."""
SHORTEST_LEASE_S = 10.0
FIRST_LEASE_SHARE = 0.25
"""Of `lease_s`, while nobody has delivered anything."""
FREE_FAILURES = 4
"""Two outages with two leases each are bad luck."""
FIRST_BACKOFF_S = 10.0
LONGEST_BACKOFF_S = 3600.0
SHORTEST_GRACE_S = 2.0
FEWEST_LEASES = 2
"""Of a reliable key, however slow: one being worked on, one being uploaded. Others may hold one."""
MOST_LEASES = 256
SHORTEST_BUSY_S = 1e-3
HELD_SHARE = 2.0
"""A key may hold this many times the tokens that it has shown to work on at once, so that a faster machine finds its place."""
QUEUE_LIMIT = 2.0
"""Times the limit of being in time: longer waits of leases inside a key do not count as work at once."""


@dataclass(frozen=True, slots=True)
class Record:
    """The deliveries of one key; recent ones count most."""

    in_time: float = 0.0
    missed: float = 0.0
    """Late deliveries and failures."""
    failures: int = 0
    """Rises with each failure, falls with each delivery."""
    failed_at: float = 0.0
    work_s: float = 0.0
    """Mean time from lease to upload of accepted files; 0 if there is none."""
    lag_s: float = -1.0
    """Mean time from the publication of a version to its first use by this key; negative if it was not observed."""
    tokens: float = 0.0
    """Tokens of accepted files, and ..."""
    busy_s: float = 0.0
    """... the time in which the key held a lease for them; both fade."""
    slot_tokens: float = 0.0
    """Mean tokens of an accepted file."""
    missed_share: float = field(init=False, compare=False)
    """Of its outcomes; every request of a large swarm looks at it."""

    def __post_init__(self) -> None:
        total = self.in_time + self.missed
        object.__setattr__(self, "missed_share", self.missed / total if total else 0.0)

    @property
    def tokens_per_s(self) -> float:
        """Observed, never claimed."""
        return self.tokens / max(self.busy_s, SHORTEST_BUSY_S)


@dataclass(frozen=True, slots=True)
class Pace:
    """What can be expected of a key that works."""

    work_s: float | None
    """Median over keys; none while nobody has delivered."""
    missed_limit: float
    longest_s: float
    """The setting `lease_s`."""
    lag_s: float | None = None
    slot_tokens: float = 0.0
    """Median over keys of the tokens of a slot."""

    @property
    def in_time_s(self) -> float:
        """A slot that takes longer is late, and another key gets it too."""
        if self.work_s is None:
            return FIRST_LEASE_SHARE * self.longest_s / 2
        return min(self.longest_s, max(IN_TIME * self.work_s, self.work_s + IN_TIME_SLACK_S))

    @property
    def grace_s(self) -> float:
        """How long after its publication a version may still be missing at a key."""
        if self.lag_s is None:
            return self.longest_s
        return min(self.longest_s, max(SHORTEST_GRACE_S, 2 * self.lag_s))


def pace(records: Sequence[Record], longest_s: float) -> Pace:
    """The pace of the keys that delivered lately."""
    work = _median([record.work_s for record in records if record.work_s > 0])
    missed = _median([record.missed_share for record in records])
    lag = _median([record.lag_s for record in records if record.lag_s >= 0])
    slot_tokens = _median([record.slot_tokens for record in records if record.slot_tokens > 0])
    return Pace(work, max(MISSED_SHARE, 2 * (missed or 0.0)), longest_s, lag, slot_tokens or 0.0)


def _median(values: Sequence[float]) -> float | None:
    """The lower one of two, so that one slow key beside one fast key does not double the limits."""
    return sorted(values)[(len(values) - 1) // 2] if values else None


def is_reliable(record: Record, pace: Pace) -> bool:
    return least_limit(record) <= pace.missed_limit


def least_limit(record: Record) -> float:
    """Of what a reliable key may miss, so that this one is reliable; infinite before it has delivered enough."""
    return record.missed_share if record.in_time >= FEWEST_IN_TIME else math.inf


def is_enforced(records: Sequence[Record], pace: Pace) -> bool:
    """Whether enough of what is delivered comes from reliable keys, so that a step can do without the others.

    Work is counted, not keys: keys are free, and one machine could deliver a little with many of them.
    """
    limit, least = pace.missed_limit, FEWEST_IN_TIME  # `is_reliable` without a call for each record
    reliable = sum([one.in_time for one in records if one.in_time >= least and one.missed_share <= limit])
    return reliable > 0 and ENFORCED_SHARE * reliable >= sum([record.in_time for record in records])


def is_current(record: Record, silence_s: float, longest_s: float) -> bool:
    """Whether a key takes part, by the time between its last delivery and the newest one of any key.

    A key that has delivered nothing for as long as a lease of its own lasts must not keep others off the critical path. Time in
    which nobody delivers, such as a long training step, counts for nobody.
    """
    return silence_s <= longest_silence_s(record, longest_s)


def longest_silence_s(record: Record, longest_s: float) -> float:
    """Of a key that takes part."""
    return min(longest_s, max(SHORTEST_LEASE_S, LEASE_MARGIN * record.work_s))


def are_all_current(longest_silence_s: float, longest_s: float) -> bool:
    """Whether all keys take part, whatever their leases: no one of them has been silent for longer than this."""
    return longest_silence_s <= min(longest_s, SHORTEST_LEASE_S)


def after_delivery(record: Record, work_s: float, pace: Pace) -> Record:
    """The record after an accepted file."""
    in_time = work_s <= pace.in_time_s or pace.work_s is None
    return replace(
        record,
        in_time=KEEP * record.in_time + in_time,
        missed=KEEP * record.missed + (not in_time),
        failures=max(0, record.failures - 1),
        work_s=_mean(record.work_s if record.work_s > 0 else None, work_s),
    )


def after_tokens(record: Record, tokens: int, busy_s: float) -> Record:
    """The record after an accepted file; `busy_s` is the time since its lease or, if that is later, since the file before it."""
    return replace(
        record,
        tokens=KEEP * record.tokens + tokens,
        busy_s=KEEP * record.busy_s + max(0.0, busy_s),
        slot_tokens=_mean(record.slot_tokens or None, float(tokens)),
    )


def tokens_allowed(record: Record, pace: Pace) -> float:
    """Tokens that a key may hold leases for: speed times duration is what it has shown to work on at once.

    A key that takes leases and lets them wait gains nothing: its speed stays the same, and the wait counts up to a limit.
    """
    return HELD_SHARE * record.tokens_per_s * min(record.work_s, QUEUE_LIMIT * pace.in_time_s)


def leases_allowed(record: Record, pace: Pace, *, reliable: bool) -> int:
    fewest = FEWEST_LEASES if reliable else 1
    if not pace.slot_tokens:
        return fewest
    return max(fewest, min(MOST_LEASES, round(tokens_allowed(record, pace) / pace.slot_tokens)))


def after_failure(record: Record, now: float) -> Record:
    in_time, missed = KEEP * record.in_time, KEEP * record.missed + 1
    return replace(record, in_time=in_time, missed=missed, failures=record.failures + 1, failed_at=now)


def after_first_use(record: Record, lag_s: float) -> Record:
    """The record after a version was used by this key for the first time."""
    return replace(record, lag_s=_mean(record.lag_s if record.lag_s >= 0 else None, max(0.0, lag_s)))


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else 0.75 * before + 0.25 * newest


def lease_s(record: Record, pace: Pace) -> float:
    """How long a lease lasts: by the key's own deliveries, else by those of the swarm.

    After a failure the next lease is longer, or a slow machine could never deliver. That harms nobody: no batch waits for it.
    """
    expected = record.work_s or pace.work_s
    first = FIRST_LEASE_SHARE * pace.longest_s if expected is None else max(SHORTEST_LEASE_S, LEASE_MARGIN * expected)
    return float(min(pace.longest_s, first * 2.0 ** min(record.failures, 16)))


def backoff_s(record: Record, now: float) -> float:
    """How long a key that fails again and again still waits for its next lease."""
    beyond = record.failures - FREE_FAILURES
    if beyond < 0:
        return 0.0
    wait_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(beyond, 16))
    return max(0.0, record.failed_at + wait_s - now)
