"""The owner's roles of a simulated swarm: a trainer that publishes beside its next step, and validators that wait for files."""

import itertools
from functools import partial

from shoal.coordinator.rules.trust import groups_to_audit
from shoal.protocol import api
from shoal.protocol.verdicts import Reason
from shoal.simulation.memory.models import made
from shoal.simulation.swarm.world import World

NO_METRICS = api.AuditMetrics()


class SwarmTrainer:
    """Trains on each batch in turn; a version is staged, recorded and announced while the next step runs."""

    def __init__(self, world: World) -> None:
        self.world, self.spec = world, world.spec.trainer
        self.step, self.ready_at, self.waited_s = 0, world.clock.now, 0.0
        self.is_training, self.publishing_until = False, world.clock.now
        self.begun_at: list[float] = []
        self._publish(0)

    def look(self) -> None:
        """Begins the step if its batch is there."""
        now, formed_at = self.world.clock.now, self.world.formed_at
        formed_at.extend([now] * (self.world.coordinator.step() - len(formed_at)))
        if self.is_training or self.world.coordinator.step() <= self.step:
            return
        self.is_training = True
        self.waited_s = now - self.ready_at
        self.world.counted.trainer_wait_s += self.waited_s
        self.begun_at.append(now)
        self.world.coordinator.record(self.step)
        self.world.clock.after(self.spec.batch_s + self.spec.step_s, self._trained)

    def _trained(self) -> None:
        """The version before must be out before the weights can be handed over."""
        waits_s = max(0.0, self.publishing_until - self.world.clock.now)
        self.world.counted.publish_wait_s += waits_s
        self.world.clock.after(waits_s, self._hand_over)

    def _hand_over(self) -> None:
        self.step, self.is_training, self.ready_at = self.step + 1, False, self.world.clock.now
        self.publishing_until = self.world.clock.now + self.spec.stage_s
        self.world.clock.after(self.spec.stage_s, partial(self._publish, self.step, self.waited_s))
        self.look()

    def _publish(self, version: int, waited_s: float = 0.0) -> None:
        world = self.world
        size_bytes = world.broadcast.plans.fetch_bytes(version, version - 1 if version else None)
        world.coordinator.publish(version, self.spec.stage_s if version else 0.0, waited_s, round(size_bytes))
        world.published_at.append(world.clock.now)
        world.counted.bytes["version"] += size_bytes


class Validators:
    """Each checks one file at a time; an idle one hears of a new file at once, as a long poll does."""

    def __init__(self, world: World) -> None:
        self.world, self.spec = world, world.spec.validators
        self.idle = self.spec.count
        self._requests = itertools.count()

    def look(self) -> None:
        while self.idle:
            claim = self.world.coordinator.claim("validator", f"claim-{next(self._requests):08}")
            if claim is None:
                return
            self.idle -= 1
            self._check(claim)

    def _check(self, claim: api.Claim) -> None:
        world, seed = self.world, claim.lease.slot_seed
        work = world.workload.of(seed)
        useful = {group.group for group in work.groups if group.useful}
        audited = groups_to_audit(claim.audit_groups, claim.audit_order, useful, claim.unaudited_limits)
        seconds = self.spec.file_s + world.workload.audit_tokens(work, audited) / self.spec.audit_tokens_per_s
        world.counted.validating_s += seconds
        world.counted.file_wait_s += world.clock.now - world.received_at.pop(claim.lease.lease_id, world.clock.now)
        world.counted.checked_groups += len(work.groups)
        world.counted.audited_groups += len(audited)
        world.counted.bytes["validator_down"] += round(world.workload.file_bytes(work))
        world.clock.after(seconds, partial(self._decide, claim, audited, seconds))

    def _decide(self, claim: api.Claim, audited: list[int], seconds: float) -> None:
        lease, work = claim.lease, self.world.workload.of(claim.lease.slot_seed)
        forged = self.world.forged.get(lease.lease_id, set()).intersection(audited)
        is_junk = lease.lease_id in self.world.junk
        body = made(
            api.VerdictBody,
            claim_id=claim.claim_id,
            submission_id=claim.submission_id,
            accepted=not (forged or is_junk),
            reasons=[Reason.COMMITMENT] if forged else [Reason.LOGPROBS] if is_junk else [],
            audited_groups=audited,
            groups=[] if forged or is_junk else list(work.groups),
            metrics=NO_METRICS,
            seconds=seconds,
        )
        if body.accepted:
            tokens = self.world.counted.tokens
            tokens["accepted"] += work.tokens
            tokens["no_signal"] += sum(group.tokens for group in work.groups if not group.useful)
        self.world.request(partial(self._send, body))

    def _send(self, body: api.VerdictBody) -> None:
        self.world.coordinator.verdict(body)
        self.idle += 1
        self.world.on_verdict()
        self.look()
