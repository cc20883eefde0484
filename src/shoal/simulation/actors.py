"""The trusted actors of a simulated run, and what the work of a slot is."""

import itertools
import random
from collections.abc import Callable, Set
from dataclasses import dataclass

from shoal.coordinator.rules.trust import groups_to_audit
from shoal.protocol import api
from shoal.protocol.verdicts import Reason
from shoal.simulation.clock import EventClock
from shoal.simulation.operations import Operations

POLL_S = 0.1


@dataclass(frozen=True)
class Work:
    """What slots ask for: both follow from the seed of the slot alone, so every honest key makes the same."""

    seconds: float
    """Of a slot of middle length on a machine of speed 1."""
    spread: float
    """Standard deviation of the logarithm of the length."""
    takes_longer: bool = True
    """Whether long slots take longer."""
    useful_share: float = 0.6

    def length(self, seed: str) -> float:
        return random.Random(seed).lognormvariate(0.0, self.spread)

    def duration_s(self, seed: str, speed: float) -> float:
        return self.seconds * (self.length(seed) if self.takes_longer else 1.0) / speed

    def groups(self, seed: str, count: int) -> list[api.GroupVerdict]:
        """Long answers are right more often, so a bias in length shows in the rewards."""
        chance, length = random.Random(f"groups {seed}"), self.length(seed)
        return [self._group(chance, number, length) for number in range(count)]

    def _group(self, chance: random.Random, number: int, length: float) -> api.GroupVerdict:
        reward = float(chance.random() < min(0.9, 0.5 * length))
        return api.GroupVerdict(
            group=number,
            task_id=f"task-{chance.randrange(1000)}",
            useful=chance.random() < self.useful_share,
            tokens=max(1, round(100 * length)),
            rewards=[reward, 1.0 - reward],
            task_rewards=[reward, 1.0 - reward],
            samples=[f"{chance.getrandbits(64):016x}" for _ in range(2)],
        )


class Trainer:
    """Trains on each batch in turn and publishes the version that follows."""

    def __init__(self, coordinator: Operations, clock: EventClock, train_s: float) -> None:
        self.coordinator, self.clock, self.train_s = coordinator, clock, train_s
        self.version = 0
        self.published_at = [clock()]
        self.formed_at: list[float] = []
        coordinator.publish(0)
        clock.after(0.0, self._look)

    def _look(self) -> None:
        while len(self.formed_at) < self.coordinator.step():
            self.formed_at.append(self.clock())
        if self.coordinator.step() > self.version:
            self.coordinator.record(self.version)
            self.clock.after(self.train_s, self._publish)
        else:
            self.clock.after(POLL_S, self._look)

    def _publish(self) -> None:
        self.version += 1
        self.coordinator.publish(self.version)
        self.published_at.append(self.clock())
        self._look()


class Validator:
    """Verifies one file after the other; rejects junk."""

    def __init__(
        self, coordinator: Operations, clock: EventClock, work: Work, junk: Set[str], name: str, seconds: float
    ) -> None:
        self.coordinator, self.clock, self.work, self.name, self.seconds = coordinator, clock, work, name, seconds
        self.junk = junk
        self._requests = itertools.count()
        clock.after(0.0, self._look)

    def _look(self) -> None:
        claim = self.coordinator.claim(self.name, f"{self.name}-{next(self._requests):08}")
        if claim is None:
            self.clock.after(POLL_S, self._look)
        else:
            self.clock.after(self.seconds, self._decider(claim))

    def _decider(self, claim: api.Claim) -> Callable[[], None]:
        def decide() -> None:
            self.coordinator.verdict(self._verdict(claim))
            self._look()

        return decide

    def _verdict(self, claim: api.Claim) -> api.VerdictBody:
        is_junk = claim.lease.lease_id in self.junk
        per_slot = self.coordinator.config.rollouts.tasks_per_slot
        groups = [] if is_junk else self.work.groups(claim.lease.slot_seed, per_slot)
        useful = {group.group for group in groups if group.useful}
        return api.VerdictBody(
            claim_id=claim.claim_id,
            submission_id=claim.submission_id,
            accepted=not is_junk,
            reasons=[Reason.LOGPROBS] if is_junk else [],
            audited_groups=groups_to_audit(claim.audit_groups, claim.audit_order, useful, claim.unaudited_limits),
            groups=groups,
        )
