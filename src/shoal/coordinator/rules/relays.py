"""Which relays have a place in the list that everybody gets, and what reports about a relay come to. Pure.

The owner's relays always have a place. Relays that were measured to serve come next. What is left, a quarter at least, goes to
newcomers in turn, a few per address: one that nobody measured in its turn goes behind those that wait. A relay that was measured
to fail has no place until those reports are old. The owner's roles are believed; of others a majority of at least three
addresses decides, each with one vote, by keys with accepted work. So no single stranger moves a relay in or out.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

Measured = Literal["serves", "fails", "unknown"]

PLACES = 64
NEWCOMERS = 16
PER_ADDRESS = 2
"""Newcomers of one address that have a place at a time."""
TURN_S = 300.0
"""How long a newcomer keeps its place while others wait; long enough for a version to be published."""
JURY = 3
GOOD_LASTS_S = 6 * 3600.0
BAD_LASTS_S = 1800.0
FADING = 0.9
"""What earlier reports of a client weigh beside its newest one."""


@dataclass(frozen=True)
class Vote:
    """What one address, or one of the owner's roles, last reported about a relay."""

    at: float
    is_good: bool
    is_owners: bool = False
    served: float = 0.0
    """Requests of this and, with less weight, of earlier reports."""
    failed: float = 0.0

    def counts(self, now: float) -> bool:
        return now - self.at <= (GOOD_LASTS_S if self.is_good else BAD_LASTS_S)

    def after(self, earlier: "Vote | None") -> "Vote":
        """This report with what is left of the one before it."""
        if earlier is None or not earlier.counts(self.at):
            return self
        served, failed = self.served + FADING * earlier.served, self.failed + FADING * earlier.failed
        return replace(self, served=served, failed=failed)


@dataclass(frozen=True)
class Success:
    """How well a relay serves: the mean over its clients, each with the share of its requests that were answered."""

    share: float
    reporters: int


@dataclass(frozen=True)
class Candidate:
    key: str
    address: str
    announced_at: float
    """Since when it announces itself without a pause."""
    turn_at: float | None
    """When its last turn as a newcomer began."""
    is_owners: bool
    measured: Measured


def measured(votes: Iterable[Vote], now: float) -> Measured:
    believed = jury(votes, now)
    if not believed:
        return "unknown"
    good = sum(vote.is_good for vote in believed)
    return "serves" if 2 * good >= len(believed) else "fails"


def success(votes: Iterable[Vote], now: float) -> Success | None:
    """Each reporter counts once, whatever number of requests it claims."""
    shares = [vote.served / (vote.served + vote.failed) for vote in jury(votes, now) if vote.served + vote.failed]
    return Success(fmean(shares), len(shares)) if shares else None


def jury(votes: Iterable[Vote], now: float) -> list[Vote]:
    """The reports that decide: the owner's, or else those of enough others."""
    recent = [vote for vote in votes if vote.counts(now)]
    own = [vote for vote in recent if vote.is_owners]
    return own or (recent if len(recent) >= JURY else [])


def places(candidates: Sequence[Candidate], now: float) -> list[str]:
    """Keys of the relays that have a place."""
    owners = [one.key for one in candidates if one.is_owners]
    serving = sorted((one for one in candidates if _is(one, "serves")), key=lambda one: (one.announced_at, one.key))
    proven = [one.key for one in serving[: PLACES - NEWCOMERS]]
    newcomers = sorted((one for one in candidates if _is(one, "unknown")), key=lambda one: _turn(one, now))
    chosen, taken = list[str](), Counter[str]()
    for one in newcomers:
        if len(proven) + len(chosen) < PLACES and taken[one.address] < PER_ADDRESS:
            taken[one.address] += 1
            chosen.append(one.key)
    return [*owners, *proven, *chosen]


def _is(candidate: Candidate, wanted: Measured) -> bool:
    return not candidate.is_owners and candidate.measured == wanted


def _turn(candidate: Candidate, now: float) -> tuple[int, float, str]:
    """Those whose turn it is, then those that never had one, then those whose turn was longest ago."""
    if candidate.turn_at is None:
        return 1, candidate.announced_at, candidate.key
    has_turn = now - candidate.turn_at < TURN_S
    return (0 if has_turn else 2), candidate.turn_at, candidate.key
