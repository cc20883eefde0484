"""Keys at the audit floor, of which some turn hostile, on the coordinator's own code and an event clock."""

import random
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

from benchmarks.poisoning.recipe import demo
from shoal.coordinator.rules import unaudited
from shoal.coordinator.rules.trust import groups_to_audit
from shoal.coordinator.store.rows import select
from shoal.coordinator.store.tables import GroupRow, WorkerRow
from shoal.files import digest_bytes
from shoal.protocol import api
from shoal.protocol.verdicts import Reason
from shoal.simulation import EventClock, LocalCoordinator

HONEST_KEYS = 8
STRATEGIES = ("all", "share", "one", "pair", "together", "patient")
USEFUL = 0.55
"""Share of honest groups that have a signal."""
LONGEST_CAREER = 200
"""Steps."""
HONEST_STEPS = 60


class Career:
    """Keys at the floor, of which some turn hostile, until the last of those is banned."""

    def __init__(
        self,
        seed: int,
        hostile: int,
        strategy: str,
        kind: dict[str, Any],
        honest: Sequence[float],
        unaudited_share: float | None = None,
    ) -> None:
        self.random, self.strategy, self.kind, self.honest = random.Random(f"career {seed}"), strategy, kind, honest
        self.config = demo()
        run = self.config.run.model_copy(update={"steps": LONGEST_CAREER + 1})
        self.config = self.config.model_copy(update={"run": run})
        if unaudited_share is not None:
            trust = self.config.trust.model_copy(update={"unaudited_share": unaudited_share})
            self.config = self.config.model_copy(update={"trust": trust})
        self.limit = unaudited.limit_of_key(self.config.training, self.config.trust)
        self.clock = EventClock()
        secret = bytes.fromhex(digest_bytes(f"career {seed} {hostile} {strategy}".encode()))
        self.coordinator = LocalCoordinator(self.config, self.clock, secret)
        self.coordinator.publish(0)
        self.hostile = [digest_bytes(f"hostile {number}".encode()) for number in range(hostile)]
        self.keys = [digest_bytes(f"honest {number}".encode()) for number in range(HONEST_KEYS)] + self.hostile
        for key in self.keys:
            self.coordinator.register(key)
        self.coordinator.connection.execute("UPDATE workers SET state='active', clean_audits=600")
        self.files: dict[str, list[dict[str, Any]]] = {}
        self.poisoned: dict[str, bool] = {}
        self.values: dict[str, float] = {}
        self.owners: dict[str, str] = {}
        self.requests = 0

    def run(self) -> dict[str, Any]:
        consumed, batches, step = dict.fromkeys(self.hostile, 0), [], 0
        while step < LONGEST_CAREER and set(self.hostile) - self.banned():
            while self.coordinator.step() == step:
                self._work()
            batch = self.coordinator.record(step, lambda group: self.values[group])
            self._validate()  # groups that were held back
            bad = [group for group in batch.groups if self.poisoned[group.group_id]]
            of_keys = Counter(self.owners[group.submission_id] for group in bad)
            for key, count in of_keys.items():
                consumed[key] += count
            batches.append((len(bad), max(of_keys.values(), default=0), max(1, len(batch.groups))))
            step += 1
            self.clock.now += 10.0
            self.coordinator.publish(step)
        ended = not set(self.hostile) - self.banned()
        audited = self._audited_share()
        self.coordinator.close()
        return {
            "consumed": list(consumed.values()),
            "poisoned": [bad for bad, _, _ in batches],
            "shares": [bad / groups for bad, _, groups in batches],
            "key_shares": [most / groups for _, most, groups in batches],
            "steps": step,
            "all_banned": ended,
            "audited": audited,
        }

    def run_honest(self, steps: int) -> float:
        """Share of the useful groups that is audited."""
        for step in range(steps):
            while self.coordinator.step() == step:
                self._work()
            self.coordinator.record(step)
            self.clock.now += 10.0
            self.coordinator.publish(step + 1)
        audited = self._audited_share()
        self.coordinator.close()
        return audited

    def banned(self) -> set[str]:
        return {row.key for row in select(self.coordinator.connection, WorkerRow, "WHERE state='banned'")}

    def _audited_share(self) -> float:
        """Of the groups with a signal."""
        rows = select(self.coordinator.connection, GroupRow, "WHERE useful=1")
        return statistics.fmean(row.logprobs_verified for row in rows)

    def _work(self) -> None:
        """Every key that may does one slot, in a random order; all files are then verified."""
        versions = list(range(self.coordinator.step() + 1))
        leases, banned = dict[str, api.Lease](), self.banned()
        for key in self.random.sample(self.keys, len(self.keys)):
            if key in banned:
                continue
            self.coordinator.run.presence.seen(key)
            self.requests += 1
            lease = self.coordinator.lease(key, f"request-{self.requests:08}", versions).lease
            if lease is not None:
                leases[key] = lease
        hostile = set(self.hostile) - banned
        forging = hostile if self.strategy != "together" or hostile <= leases.keys() else set()
        for key, lease in leases.items():
            self.files[lease.lease_id] = self._groups(key in forging)
            for group in self.files[lease.lease_id]:
                name = f"{lease.step}/{lease.slot}/{group['number']}"
                self.poisoned[name], self.values[name] = group["poisoned"], group["statistic"]
            self.clock.now += 0.5
            self.coordinator.submit(key, lease.lease_id, lease.lease_id.encode())
        self._validate()
        self.clock.now += 1.0

    def _groups(self, forge: bool) -> list[dict[str, Any]]:
        signals = [self.random.random() < USEFUL for _ in range(8)]
        forged, useful = self._forged(signals) if forge else ([False] * 8, signals)
        made = [self._group(*one) for one in zip(forged, useful, strict=True)]
        self.random.shuffle(made)
        return [group | {"number": number} for number, group in enumerate(made)]

    def _forged(self, signals: list[bool]) -> tuple[list[bool], list[bool]]:
        """Which groups are forged, and which have a signal then."""
        match self.strategy:
            case "all":
                return [True] * 8, [True] * 8
            case "share":
                return [True] * 8, [number < self.limit for number in range(8)]
            case "one":
                return [number == 0 for number in range(8)], [True, *signals[1:]]
            case "pair" | "together":
                return [number < 2 for number in range(8)], [True, True, *signals[2:]]
            case _:  # only where nothing beyond the draw is audited, so that nothing else needs forging
                return signals if sum(signals) <= self.limit else [False] * 8, signals

    def _group(self, forged: bool, useful: bool) -> dict[str, Any]:
        if not forged:
            return {"poisoned": False, "proven": False, "useful": useful, "statistic": self.random.choice(self.honest)}
        index = self.random.randrange(len(self.kind["statistics"]))
        statistic, proven = self.kind["statistics"][index], self.kind["proven"][index]
        return {"poisoned": True, "proven": proven, "useful": useful, "statistic": statistic}

    def _validate(self) -> None:
        self.requests += 1
        while (claim := self.coordinator.claim("validator", f"claim-{self.requests:08}")) is not None:
            self.owners[claim.submission_id] = claim.worker_key
            groups = self.files[claim.lease.lease_id]
            useful = {group["number"] for group in groups if group["useful"]}
            audited = groups_to_audit(claim.audit_groups, claim.audit_order, useful, claim.unaudited_limits)
            proven = any(groups[number]["proven"] for number in audited)
            self.coordinator.verdict(
                api.VerdictBody(
                    claim_id=claim.claim_id,
                    submission_id=claim.submission_id,
                    accepted=not proven,
                    reasons=[Reason.SAMPLING] if proven else [],
                    audited_groups=audited,
                    groups=[] if proven else [_verdict(group) for group in groups],
                )
            )
            self.requests += 1


def _verdict(group: dict[str, Any]) -> api.GroupVerdict:
    rewards = [1.0, 0.0] if group["useful"] else [0.0, 0.0]
    return api.GroupVerdict(
        group=group["number"], task_id="task", useful=group["useful"], tokens=150, rewards=rewards, task_rewards=rewards
    )


def careers(
    kind: dict[str, Any],
    values: Sequence[float],
    hostile: int,
    strategy: str,
    count: int,
) -> list[dict[str, Any]]:
    return [Career(seed, hostile, strategy, kind, values).run() for seed in range(count)]


def honest_audited(unaudited_share: float, *, per_key_only: bool = False) -> float:
    """Share of the useful groups of honest keys at the floor that is audited; without the rate per file if it is so said."""
    chance = 1.0 if per_key_only else unaudited.ESCAPE_CHANCE
    with mock.patch.object(unaudited, "ESCAPE_CHANCE", chance):
        return round(Career(0, 0, "one", {}, (0.0,), unaudited_share).run_honest(HONEST_STEPS), 3)
