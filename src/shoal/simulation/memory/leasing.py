"""Leases over tables in memory: what `coordinator.work.leasing` and `work.deliveries` read and write, with the same rules.

`rules.leases` decides. The pace of the swarm is computed again when something that it follows from has changed.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from shoal.config import ShoalConfig
from shoal.coordinator.batching.timing import LeaseTiming
from shoal.coordinator.rules import batches, deliveries, freshness, leases
from shoal.coordinator.states import LeaseState, SlotState
from shoal.coordinator.work.leasing import FAILING, lease_name
from shoal.protocol import api
from shoal.protocol.assignment import slot_seed
from shoal.simulation.memory import slots
from shoal.simulation.memory.late import LateSlots
from shoal.simulation.memory.models import made
from shoal.simulation.memory.observer import Observed, Observer
from shoal.simulation.memory.presence import BeatingPresence
from shoal.simulation.memory.refusals import BEST, FULL, KINDS, CommonView, Frame, Refusals
from shoal.simulation.memory.tables import Key, Lease, Slot, Tables

NO_COUNTS = batches.StepCounts(0, 0, 0, 0)
SETTLING_S = 1e-6
"""Just before a version settles no answer is kept: two sums of floats may differ in their last digit."""


class Leasing:
    def __init__(self, tables: Tables, config: ShoalConfig, clock: Callable[[], float], secret: bytes) -> None:
        self.tables, self.config, self.clock, self.secret = tables, config, clock, secret
        self.presence = BeatingPresence(clock, config.coordinator.gone_after_s)
        self.observer = Observer(tables, config, clock, self.presence)
        self.timing = LeaseTiming() if config.coordinator.just_in_time else None
        self.late = LateSlots(tables, self.observer, self.presence, secret)
        self._counted: tuple[tuple[int, int], batches.StepCounts] | None = None
        self._common: CommonView | None = None
        self.refusals = Refusals(config.training, config.trust)
        self._numbers = itertools.count()

    # One request for work

    def decide(self, key: Key, held_versions: tuple[int, ...]) -> leases.Grant | leases.Refused:
        now, tables = self.clock(), self.tables
        if tables.expiring and tables.expiring[0][0] < now:
            self.expire()
        observed = self.observer.observe()
        common = self._common_at(observed, now)
        is_reliable = self.observer.is_reliable(key, observed)
        late = self.late.drawn(key, observed, held_versions, now) if is_reliable else None
        polling = self.presence.polling_at(now, has_delivered=key.delivered_at > 0)
        others, others_active = self._others(key)
        swarm = common.swarm._replace(
            keys_polling=polling, has_other_workers=others, has_other_active_workers=others_active
        )
        asking = self._key_view(key, observed, held_versions, late, is_reliable=is_reliable)
        return leases.decide(swarm, asking, self.config.training, self.config.trust)

    def common_refusal(self, key: Key, held_versions: tuple[int, ...], now: float) -> leases.Refused | None:
        """What the key hears, but for its wait among others, if all keys of its kind hear it; else the request must be decided.

        Nearly all requests of a large swarm end here, so it looks at what is known before it calls anything.
        """
        tables, record = self.tables, key.record
        if record.failures >= deliveries.FREE_FAILURES and deliveries.backoff_s(record, now):
            return None
        if tables.expiring and tables.expiring[0][0] < now:
            self.expire()
        observed, common = self.observer.known, self._common
        if observed is None or now > observed.until:
            observed = self.observer.observe()
        if (
            common is None
            or common.revision != tables.revision
            or common.observed is not observed
            or now >= common.until
        ):
            common = self._common_at(observed, now)
        is_reliable = key.least_limit <= observed.limit
        if is_reliable and self.late.is_any(now) and self._is_drawn(key, observed, held_versions, now):
            return None
        answers = common.to_best[is_reliable]
        if held_versions not in answers:
            answers[held_versions] = self.refusals.get(common, BEST[is_reliable], held_versions)
        refusal = answers[held_versions]
        if refusal is not None:
            return refusal
        return self._refusal_by_limits(common, key, observed, held_versions, is_reliable=is_reliable)

    def _is_drawn(self, key: Key, observed: Observed, held_versions: tuple[int, ...], now: float) -> bool:
        """Whether a reliable key may have another lease, and was drawn for a late slot."""
        if key.leased and self._is_full(key, observed, is_reliable=True):
            return False
        return self.late.drawn(key, observed, held_versions, now) is not None

    def _refusal_by_limits(
        self, common: CommonView, key: Key, observed: Observed, held_versions: tuple[int, ...], *, is_reliable: bool
    ) -> leases.Refused | None:
        """Of a key that would get work if it were alone."""
        if key.leased and self._is_full(key, observed, is_reliable=is_reliable):
            return self.refusals.get(common, FULL[is_reliable], held_versions)
        kind = KINDS[is_reliable, key.trust.state == "active", *self._others(key)]
        return self.refusals.get(common, kind, held_versions)

    def _common_at(self, observed: Observed, now: float) -> CommonView:
        common = self._common
        if common is None or not common.holds(self.tables.revision, observed, now):
            common = self._common = self._common_now(observed, now)
        return common

    def _others(self, key: Key) -> tuple[bool, bool]:
        """Whether another key works, and whether one of those does that have left probation."""
        active = self._has_others(key, active=True)
        return active or self._has_others(key, active=False), active

    def _is_full(self, key: Key, observed: Observed, *, is_reliable: bool) -> bool:
        """Whether it holds all the leases that it may."""
        return len(key.leased) >= self._allowed(key, observed, is_reliable=is_reliable)

    def _allowed(self, key: Key, observed: Observed, *, is_reliable: bool) -> int:
        """How many leases it may hold, computed again only if its record or the pace of the swarm is another one."""
        known, pace = key.allowed, observed.pace
        if known is None or known[0] is not key.record or known[1] is not pace or known[2] is not is_reliable:
            allowed = deliveries.leases_allowed(key.record, pace, reliable=is_reliable)
            known = key.allowed = (key.record, pace, is_reliable, allowed)
        return known[3]

    def grant(self, key: Key, request_id: str, grant: leases.Grant) -> Lease:
        now, pace = self.clock(), self.observer.observe().pace
        step, due_at = self.tables.of_step(grant.step), now + pace.in_time_s
        is_new = grant.slot == len(step.slots)
        slot = (
            Slot(
                grant.step,
                grant.slot,
                SlotState.LEASED,
                None,
                grant.version,
                key.numerics_class,
                grant.deferred,
                due_at,
            )
            if is_new
            else step.slots[grant.slot]
        )
        lease = Lease(
            lease_name(self.secret, key.key, request_id),
            key,
            grant.step,
            slot,
            grant.version,
            now,
            now + deliveries.lease_s(key.record, pace),
            by_active_key=key.trust.state == "active",
        )
        if is_new:
            slot.lease = lease
            slots.first_slot(self.tables, lease)
        else:
            terms = {"numerics_class": key.numerics_class, "deferred": grant.deferred, "due_at": due_at}
            slots.take_again(self.tables, slot, lease, **terms)  # type: ignore[arg-type]
        self.tables.leases[lease.lease_id] = lease
        heapq.heappush(self.tables.expiring, (lease.expires_at, next(self._numbers), lease))
        self._note_grant(key, now)
        self._note_first_use(key, grant.version, now)
        return lease

    def lease_view(self, lease: Lease, secret_of_step: bytes) -> api.Lease:
        if lease.view is None:
            lease.view = self._lease_view(lease, secret_of_step)
        return lease.view

    def _lease_view(self, lease: Lease, secret_of_step: bytes) -> api.Lease:
        return made(
            api.Lease,
            lease_id=lease.lease_id,
            step=lease.step,
            slot=lease.slot.number,
            slot_seed=slot_seed(secret_of_step, lease.slot.number).hex(),
            policy_version=lease.version,
            manifest_digest="",
            expires_at=lease.expires_at,
        )

    def _note_grant(self, key: Key, now: float) -> None:
        recent, since = self.tables.recent[key.trust.state == "active"], now - self.config.coordinator.lease_s
        recent.append((now, key))
        while recent[0][0] < since:
            recent.popleft()

    def _note_first_use(self, key: Key, version: int, now: float) -> None:
        if version <= key.newest_used:
            return
        if key.newest_used >= 0:
            published_at = self.tables.versions[version].published_at
            key.record = deliveries.after_first_use(key.record, now - published_at)
            self.observer.changed(key)
        key.newest_used = version

    def expire(self) -> bool:
        """Drops leases whose deadline has passed."""
        expiring, now, found = self.tables.expiring, self.clock(), False
        while expiring and expiring[0][0] < now:
            lease = heapq.heappop(expiring)[2]
            if lease.state is LeaseState.LEASED:
                self.drop(lease, LeaseState.EXPIRED)
                found = True
        return found

    def drop(self, lease: Lease, state: LeaseState) -> None:
        slots.drop_lease(self.tables, lease, state)
        self.fail(lease.key)

    def fail(self, key: Key) -> None:
        """Counts a lease that came to nothing."""
        key.record = deliveries.after_failure(key.record, self.clock())
        self.observer.changed(key)

    def _common_now(self, observed: Observed, now: float) -> CommonView:
        """What does not depend on the key that asks; most changes are of counts alone."""
        step, last, frame = (
            self.tables.step,
            self._common,
            (self.tables.step, len(self.tables.versions), observed.pace.grace_s),
        )
        if last is None or last.frame != frame or now >= last.until:
            last = self._new_frame(frame, now)
        counted = last.swarm._replace(
            counts=self.counts(step), next_slot=len(self.tables.of_step(step).slots), ahead=self._next_step(step)
        )
        return CommonView(counted, self.tables.revision, observed, last.until, frame, place=last.place)

    def _new_frame(self, frame: Frame, now: float) -> CommonView:
        """The parts that follow from steps, versions and time; its counts are not those of now."""
        (step, _, grace_s), versions = frame, self.tables.versions
        timing, is_steady = self._decide_timing(step)
        oldest = max(0, step - self.config.training.async_level)
        published = list(range(oldest, min(step + 1, len(versions))))
        settled = [number for number in published if versions[number].published_at <= now - grace_s]
        swarm = leases.SwarmView(
            run_state="finished" if len(versions) > self.config.run.steps else "running",
            step=step,
            steps=self.config.run.steps,
            has_space=True,
            published=published,
            settled_version=settled[-1] if settled else None,
            counts=NO_COUNTS,
            next_slot=0,
            tasks_per_slot=self.config.rollouts.tasks_per_slot,
            keys_polling=0,
            has_other_workers=False,
            has_other_active_workers=False,
            awaited_version=timing.oldest_version if timing else 0,
            useful_share=timing.useful_share if timing else None,
            has_time=timing is not None and timing.has_time,
        )
        changes_at = [versions[number].published_at + grace_s - SETTLING_S for number in published[len(settled) :]]
        if timing is not None and timing.reason == "waits_for_version" and timing.latest_start is not None:
            changes_at.append(timing.latest_start)
        until = min(changes_at, default=float("inf")) if is_steady else now
        return CommonView(swarm, -1, None, until, frame)

    def _next_step(self, step: int) -> leases.NextStep | None:
        """While the trainer waits for the batch of the current step."""
        is_over = step + 1 >= self.config.run.steps
        if len(self.tables.versions) <= step or is_over or self.config.training.async_level < 1:
            return None
        counts = self._count(step + 1)
        deferred = sum(n for (of, _, is_deferred), n in self._young(step + 1) if of == step and is_deferred)
        return leases.NextStep(
            replace(counts, useful=counts.useful_of_step + deferred), len(self.tables.of_step(step + 1).slots)
        )

    def _young(self, step: int) -> Iterator[tuple[tuple[int, int, bool], int]]:
        """Waiting groups up to this step that its batch may hold."""
        oldest = batches.oldest_version(step, self.config.training)
        return (item for item in self.tables.waiting.items() if item[0][1] >= oldest and item[0][0] <= step)

    def counts(self, step: int) -> batches.StepCounts:
        now = (self.tables.revision, step)
        if self._counted is None or self._counted[0] != now:
            self._counted = (now, self._count(step))
        return self._counted[1]

    def _count(self, step: int) -> batches.StepCounts:
        per_slot, tally = self.config.rollouts.tasks_per_slot, self.tables.of_step(step).tally
        useful = of_step = deferred = 0
        for (of, _, is_deferred), number in self._young(step):
            useful += number
            if of == step:
                of_step += number
                deferred += number if is_deferred else 0
        leased, submitted, resolved = SlotState.LEASED, SlotState.SUBMITTED, SlotState.RESOLVED
        return batches.StepCounts(
            useful=useful - deferred,
            useful_of_step=of_step - deferred,
            outstanding_groups=(tally[leased, False] + tally[submitted, False]) * per_slot,
            resolved_groups=tally[resolved, False] * per_slot,
            probation_slots=self.tables.of_step(step).probation,
            deferred=batches.Deferred(
                deferred, (tally[leased, True] + tally[submitted, True]) * per_slot, tally[resolved, True] * per_slot
            ),
        )

    def _decide_timing(self, step: int) -> tuple[freshness.Timing | None, bool]:
        """And whether the next decision from the same past is the same: each one knows whether leases waited at the last."""
        newest = len(self.tables.versions) - 1
        if self.timing is None or newest < 0:
            return None, True
        decision = self.timing.decide(self, step, newest, self.config.training.async_level, self.clock())
        decided = self.timing.decided
        return decision, decided is not None and decided.is_waiting == decision.is_waiting

    def cycles(self, since: float) -> list[freshness.Cycle]:
        """Of the last trained steps that began since then, oldest first."""
        last = min(self.tables.step, len(self.tables.versions) - 1)
        steps = range(max(0, last - freshness.MEMORY), last)
        return [self._cycle(step, opened) for step in steps if (opened := self._opened_at(step)) >= since]

    def _opened_at(self, step: int) -> float:
        opened_at = self.tables.steps[step].opened_at if step in self.tables.steps else None
        return float("-inf") if opened_at is None else opened_at

    def _cycle(self, step: int, opened_at: float) -> freshness.Cycle:
        batch, versions = self.tables.batches[step], self.tables.versions
        return freshness.Cycle(
            fill_s=batch.formed_at - opened_at,
            train_s=versions[step + 1].published_at - max(versions[step].published_at, batch.formed_at),
            publish_s=versions[step + 1].stage_s,
            generated_groups=batch.generated,
            useful_groups=batch.useful,
            was_begun_ahead=step > 0 and opened_at < self.tables.batches[step - 1].formed_at,
        )

    def trains_since(self, newest: int) -> float:
        formed_at = self.tables.batches[newest].formed_at if newest < self.tables.step else 0.0
        return max(self.tables.versions[newest].published_at, formed_at)

    def _key_view(
        self,
        key: Key,
        observed: Observed,
        held_versions: Sequence[int],
        late: leases.OpenSlot | None,
        *,
        is_reliable: bool,
    ) -> leases.KeyView:
        step = self.tables.step
        return leases.KeyView(
            is_active=key.trust.state == "active",
            held_versions=held_versions,
            leases_held=len(key.leased),
            leases_allowed=self._allowed(key, observed, is_reliable=is_reliable),
            slots_of_step=key.holding.get(step, 0),
            open_slot=self._open_slot(key, step, any_slot=is_reliable),
            late_slot=late,
            is_reliable=is_reliable,
            backoff_s=deliveries.backoff_s(key.record, self.clock()),
            slots_of_next=key.holding.get(step + 1, 0),
            open_slot_of_next=self._open_slot(key, step + 1, any_slot=True),
        )

    def _open_slot(self, key: Key, step: int, *, any_slot: bool) -> leases.OpenSlot | None:
        dropped = self.tables.of_step(step).open_slots
        if not dropped:
            return None
        for number in sorted(dropped):
            slot = dropped[number]
            if (any_slot or slot.deferred) and not slot.was_held_by(key):
                return leases.OpenSlot(number, slot.version)
        return None

    def _has_others(self, key: Key, *, active: bool) -> bool:
        """Whether another key that is present and does not fail took a lease lately."""
        since = self.clock() - self.config.coordinator.lease_s
        for granted_at, other in reversed(self.tables.recent[active]):
            if granted_at < since:
                return False
            if other is not key and other.record.failures < FAILING and self.presence.is_present(other.key):
                return True
        return False
