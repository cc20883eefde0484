"""What came of a simulated swarm: time per step, who waited, ages, waste, bytes, audits, bans, and what the run needs.

All numbers are of the steps after the warm-up. The advice comes from `coordinator.rules.provisioning`, as in a run.
"""

import json
import math
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from shoal.coordinator.rules.provisioning import RELAY_MBIT_S, Needs, Rates, needs, needs_sentence, provision

if TYPE_CHECKING:
    from shoal.simulation.swarm.driver import Swarm

WAITS = {"need_weights": "weights", "waiting_for_trainer": "trainer"}
"""Reasons of the coordinator; any other is a lack of work."""


@dataclass(frozen=True)
class GroupResult:
    """One class of workers; shares are of the time in which they were there."""

    name: str
    count: int
    busy: float
    """Rows that sampled."""
    waits: dict[str, float]
    """Of engines with nothing in them: for work, weights or the trainer."""
    files_per_step: float
    trained_share: float
    """Of the trained groups, those of this class."""


@dataclass(frozen=True)
class SwarmResult:
    name: str
    machines: int
    steps: int
    is_finished: bool
    stopped: str
    """Why it did not reach its last step."""
    simulated_s: float
    step_s: float
    slowest_step_s: float
    steps_per_minute: float
    first_step_s: float
    trainer_wait: float
    """Share of the time in which the trainer waited for a batch."""
    publish_wait: float
    workers_wait: float
    """Share of the workers' time with an empty engine, whatever for."""
    mean_age: float
    ages: dict[int, float]
    fates: dict[str, float]
    """Shares of the generated tokens: trained, without a signal, late, lost with a worker, and the rest, which was surplus."""
    mbytes_per_step: dict[str, float]
    audited_share: float
    validators_busy: float
    requests_per_s: float
    coordinator_load: float
    slowest_answer_s: float
    first_file_s: float
    """From the first lease of a step to its first file, ..."""
    batch_s: float
    """... and to its verified batch."""
    arrival_s: float
    """From the publication of a version to the slowest class of workers."""
    hostile: int
    banned: int
    ban_after_s: float | None
    hostile_trained: float
    """Share of the trained groups that came from hostile keys."""
    groups: list[GroupResult]
    needs: Needs
    sentence: str
    advice: str
    starving: str
    formed_s: list[float] = field(default_factory=list)
    """When each step began to train, since the start."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; what never happened is null."""
        finite: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return finite


def summarise(swarm: "Swarm") -> SwarmResult:
    world, spec = swarm.world, swarm.spec
    counted, trainer = world.counted - swarm.before, swarm.trainer
    seconds, steps = world.clock.now - swarm.measured_from, trainer.step - swarm.warm_up
    step_s = seconds / steps if steps > 0 else float("inf")
    trained = [
        (step, group) for step in range(swarm.warm_up, trainer.step) for group in world.coordinator.trained(step)
    ]
    ages = Counter(step - group.version for step, group in trained)
    conduct = {member.key: (member.group, member.spec.conduct) for member in swarm.members}
    by_group = Counter(conduct[group.worker][0] for _, group in trained)
    shares = {number: by_group[number] / max(1, len(trained)) for number in range(len(spec.workers))}
    rates = _rates(swarm, step_s)
    required, found = needs(rates), provision(rates)
    begun = trainer.begun_at
    durations = [
        after - before for before, after in zip(begun[swarm.warm_up :], begun[swarm.warm_up + 1 :], strict=False)
    ]
    present_s = sum(counted.present_s.values())
    load = (counted.requests + counted.heartbeats) * world.service_s / seconds if seconds else 0.0
    bans = list(world.banned_after_s.values())
    hostile_keys = {key for key, (_, how) in conduct.items() if how != "honest"}
    return SwarmResult(
        name=spec.run.name,
        machines=spec.machines,
        steps=trainer.step,
        is_finished=trainer.step >= spec.run.steps,
        stopped=swarm.stopped,
        simulated_s=world.clock.now - swarm.begun_at,
        step_s=step_s,
        slowest_step_s=max([step_s, *durations]),
        steps_per_minute=60.0 / step_s,
        first_step_s=begun[0] - swarm.begun_at if begun else float("inf"),
        trainer_wait=counted.trainer_wait_s / seconds if seconds else 1.0,
        publish_wait=counted.publish_wait_s / seconds if seconds else 0.0,
        workers_wait=sum(counted.idle_s.values()) / present_s if present_s else 0.0,
        mean_age=sum(age * n for age, n in ages.items()) / max(1, ages.total()),
        ages={age: n / ages.total() for age, n in sorted(ages.items())},
        fates=_fates(swarm, sum(group.tokens for _, group in trained)),
        mbytes_per_step=_mbytes(swarm, max(1, steps)),
        audited_share=counted.audited_groups / max(1, counted.checked_groups),
        validators_busy=counted.validating_s / (seconds * spec.validators.count) if seconds else 0.0,
        requests_per_s=(counted.requests + counted.heartbeats) / seconds if seconds else 0.0,
        coordinator_load=load,
        slowest_answer_s=world.slowest_answer_s,
        first_file_s=_mean_since_open(swarm, swarm.world.filed_at),
        batch_s=_mean_since_open(swarm, dict(enumerate(swarm.world.formed_at))),
        arrival_s=_arrival_s(swarm),
        hostile=len(hostile_keys),
        banned=len(bans),
        ban_after_s=fmean(bans) if bans else None,
        hostile_trained=sum(group.worker in hostile_keys for _, group in trained) / max(1, len(trained)),
        groups=[_group(swarm, number, share, max(1, steps)) for number, share in shares.items()],
        needs=required,
        sentence=needs_sentence(required, rates, world.config.training.async_level),
        advice=found.sentence,
        starving=found.side,
        formed_s=[at - swarm.begun_at for at in begun],
    )


def _group(swarm: "Swarm", number: int, trained_share: float, steps: int) -> GroupResult:
    spec, counted = swarm.spec.workers[number], swarm.world.counted - swarm.before
    present_s = counted.present_s[number] or 1.0
    waits: defaultdict[str, float] = defaultdict(float)
    for (group, reason), idle_s in counted.idle_s.items():
        if group == number:
            waits[WAITS.get(reason, "work")] += idle_s / present_s
    return GroupResult(
        name=spec.name,
        count=spec.count,
        busy=counted.busy_s[number] / spec.rows / present_s,
        waits=dict(waits),
        files_per_step=counted.files[number] / steps,
        trained_share=trained_share,
    )


def _fates(swarm: "Swarm", trained: float) -> dict[str, float]:
    """A short run trains on a little that was generated during its warm-up."""
    tokens = (swarm.world.counted - swarm.before).tokens
    parts = {"trained": trained} | {name: tokens[name] for name in ("no_signal", "late", "lost")}
    total = max(1.0, tokens["generated"], sum(parts.values()))
    return {name: part / total for name, part in parts.items()} | {"surplus": 1.0 - sum(parts.values()) / total}


def _mbytes(swarm: "Swarm", steps: int) -> dict[str, float]:
    counted, has_relays = (swarm.world.counted - swarm.before).bytes, swarm.world.broadcast.has_relays
    relays = sum(pool.count for pool in swarm.spec.relays)
    sent = {
        "origin_up": counted["version"] if has_relays else counted["worker_down"],
        "relays_up": counted["worker_down"] + counted["version"] * max(0, relays - 1) if has_relays else 0,
        "worker_down": counted["worker_down"] / swarm.spec.machines,
        "worker_up": counted["worker_up"] / swarm.spec.machines,
        "coordinator_down": counted["worker_up"],
        "validators_down": counted["validator_down"],
    }
    return {name: size / steps / 1e6 for name, size in sent.items()}


def _mean_since_open(swarm: "Swarm", moments: dict[int, float]) -> float:
    opened_at = swarm.world.opened_at
    steps = [step for step in range(swarm.warm_up, swarm.trainer.step) if step in moments and step in opened_at]
    return fmean(moments[step] - opened_at[step] for step in steps) if steps else float("inf")


def _arrival_s(swarm: "Swarm") -> float:
    broadcast, version = swarm.world.broadcast, swarm.spec.weights.keyframe_every + 1
    return max(broadcast.seconds(group, version, version - 1) for group in range(len(swarm.spec.workers)))


def _rates(swarm: "Swarm", step_s: float) -> Rates:
    """What the provisioning rule reads from a run, from the simulated one."""
    world, spec, counted = swarm.world, swarm.spec, swarm.world.counted - swarm.before
    steps, per_slot = max(1, swarm.trainer.step - swarm.warm_up), world.config.rollouts.tasks_per_slot
    working_s = sum(counted.present_s.values()) - sum(counted.idle_s.values())
    groups = sum(counted.files.values()) * per_slot
    seconds = max(1e-9, world.clock.now - swarm.measured_from)
    files = max(1.0, counted.checked_groups / per_slot)
    present, idle = sum(counted.present_s.values()) / seconds, counted.idle_s

    def idle_workers(*reasons: str) -> float:
        return sum(idle_s for (_, reason), idle_s in idle.items() if reason in reasons) / seconds

    fetching = idle_workers("need_weights")
    return Rates(
        groups_per_step=groups / steps,
        step_s=step_s if math.isfinite(step_s) else 0.0,
        trainer_wait_s=counted.trainer_wait_s / steps,
        groups_per_worker_s=groups / working_s if working_s > 0 else 0.0,
        workers=round(present),
        workers_waiting=round(sum(idle.values()) / seconds - fetching),
        workers_fetching=round(fetching),
        validators_lag_s=counted.file_wait_s / files,
        files_per_step=files / steps,
        file_s=counted.validating_s / files,
        validators=spec.validators.count,
        version_bytes=counted.bytes["version"] / steps,
        relay_mbit_s=fmean([pool.up_mbit_s for pool in spec.relays] or [RELAY_MBIT_S]),
        relays=sum(pool.count for pool in spec.relays),
    )
