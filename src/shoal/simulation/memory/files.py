"""Uploads, claims, verdicts and bans over tables in memory: `coordinator.work.submissions` and `work.verdicts` without SQL.

Nobody is paid here, and nothing is written to a ledger: neither changes a decision.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest

from shoal.config import ShoalConfig
from shoal.coordinator.rules import batches, deliveries, duplicates, retries, trust, unaudited
from shoal.coordinator.states import FILLING, SUBMISSION, UNDECIDED, LeaseState, SlotState, SubmissionState
from shoal.errors import RefusedError
from shoal.protocol import api
from shoal.protocol.steps import StepId, group_name, step_secret
from shoal.protocol.verdicts import Reason
from shoal.simulation.memory import slots
from shoal.simulation.memory.leasing import Leasing
from shoal.simulation.memory.models import made
from shoal.simulation.memory.tables import File, Key, Lease, Tables


class Files:
    def __init__(
        self, tables: Tables, leasing: Leasing, config: ShoalConfig, clock: Callable[[], float], secret: bytes
    ) -> None:
        self.tables, self.leasing, self.config, self.clock, self.secret = tables, leasing, config, clock, secret
        self.trust, self.useful_rate = config.trust, unaudited.useful_rate(config.training, config.trust)
        self._numbers, self._claims = itertools.count(), itertools.count()
        self._secrets: dict[int, bytes] = {}

    def secret_of(self, step: int) -> bytes:
        known = self._secrets.get(step)
        if known is None:
            known = self._secrets[step] = step_secret(self.secret, StepId(0, step, 0))
        return known

    # Uploads and claims

    def accept(self, key: Key, lease_id: str, submission_id: str, digest: str) -> None:
        lease, now = self.tables.leases.get(lease_id), self.clock()
        if lease is None or lease.key is not key or lease.expires_at < now:
            raise RefusedError("lease_expired", "The lease ended before the file.", status=409)
        rate, step = trust.audit_rate(key.trust, self.trust), self.tables.step
        per_slot = self.config.rollouts.tasks_per_slot
        drawn = list(trust.audited_groups(self.secret_of(step), digest, rate, per_slot))
        file = File(submission_id, lease, digest, now, drawn, step, next(self._numbers))
        lease.file = file
        slots.move_lease(self.tables, lease, LeaseState.SUBMITTED)
        if lease.slot.state is SlotState.LEASED:
            slots.move_slot(self.tables, lease.slot, SlotState.SUBMITTED, lease)
        self._queue(file)

    def _queue(self, file: File) -> None:
        entry = (file.received_at, file.number, file)
        file.lease.key.files[file.submission_id] = file
        self.tables.undecided[file.submission_id] = file
        heapq.heappush(self.tables.pending, entry)
        heapq.heappush(self.tables.waited_for.setdefault(file.lease.step, []), entry)

    def claim(self) -> api.Claim | None:
        """A file that a batch waits for, else the oldest one."""
        self.release_claims()
        file = self._next_waited_for() or self._next_pending()
        if file is None:
            return None
        now, key = self.clock(), file.lease.key
        left = unaudited.limit_of_key(self.config.training, self.trust) - key.waiting_unaudited - key.promised
        self._move(file, SubmissionState.CLAIMED)
        lasts_s = retries.claim_s(self.config.validation.claim_s, self.tables.largest_version_bytes)
        file.claim_id, file.claim_expires = f"{next(self._claims):032x}", now + lasts_s
        limits = self._limits(file, max(0, left))
        file.tries, file.unaudited_limit = file.tries + 1, limits[-1]
        key.promised += file.unaudited_limit
        heapq.heappush(self.tables.claims, (file.claim_expires, file.number, file))
        return self._claim_of(file, limits)

    def _next_waited_for(self) -> File | None:
        heap = self.tables.waited_for.get(self.tables.step, [])
        while heap:
            file = heap[0][2]
            slot = file.lease.slot
            if file.state is SubmissionState.PENDING and slot.state is SlotState.SUBMITTED and not slot.deferred:
                return file
            heapq.heappop(heap)
        return None

    def _next_pending(self) -> File | None:
        heap = self.tables.pending
        while heap:
            if heap[0][2].state is SubmissionState.PENDING:
                return heap[0][2]
            heapq.heappop(heap)
        return None

    def _claim_of(self, file: File, limits: list[int]) -> api.Claim:
        lease, groups = file.lease, self.config.rollouts.tasks_per_slot
        return made(
            api.Claim,
            claim_id=file.claim_id or "",
            submission_id=file.submission_id,
            worker_key=lease.key.key,
            digest=file.digest,
            lease=self.leasing.lease_view(lease, self.secret_of(lease.step)),
            audit_groups=file.audit_groups,
            audit_order=list(trust.audit_order(self.secret_of(file.audit_step), file.digest, groups)),
            unaudited_limits=limits,
            numerics_class=lease.key.numerics_class,
        )

    def _limits(self, file: File, left_of_key: int) -> list[int]:
        coin = trust.rounding(self.secret_of(file.audit_step), file.digest)
        return unaudited.limits_of_file(self.useful_rate, self.config.rollouts.tasks_per_slot, coin, left_of_key)

    def release_claims(self) -> bool:
        claims, now, found = self.tables.claims, self.clock(), False
        while claims and (claims[0][0] < now or claims[0][2].state is not SubmissionState.CLAIMED):
            expires, _, file = heapq.heappop(claims)
            if file.state is SubmissionState.CLAIMED and file.claim_expires == expires:
                self._try_again(file, now)
                found = True
        return found

    def _try_again(self, file: File, now: float) -> None:
        """A validator that took too long: the file goes to the next one, or is quarantined."""
        limit = self.config.validation.max_tries
        retry = retries.after_fault([Reason.VALIDATOR_CRASH], now - file.received_at, file.tries, file.faults, limit)
        if retry is None:
            self._move(file, SubmissionState.QUARANTINED)
            self._decided(file)
            self.leasing.drop(file.lease, LeaseState.QUARANTINED)
            return
        file.faults, file.tries = retry.faults, retry.tries
        self._wait_again(file)

    def _wait_again(self, file: File) -> None:
        self._move(file, SubmissionState.PENDING)
        file.claim_id = None
        self._queue(file)

    def _move(self, file: File, state: SubmissionState) -> None:
        SUBMISSION.require(file.state, state)
        if file.state is SubmissionState.CLAIMED:
            file.lease.key.promised -= file.unaudited_limit
        file.state = state

    def _decided(self, file: File) -> None:
        self.tables.undecided.pop(file.submission_id, None)
        self.forget(file)

    def forget(self, file: File) -> None:
        """A file of which nothing can be taken back any more."""
        if file.state not in UNDECIDED and not file.waiting and not file.proposed:
            file.lease.key.files.pop(file.submission_id, None)

    # Verdicts

    def decide(self, body: api.VerdictBody) -> bool:
        """Applies a verdict; false if its claim had run out."""
        file = self.tables.undecided.get(body.submission_id)
        if file is None or file.claim_id != body.claim_id or file.state is not SubmissionState.CLAIMED:
            return False
        event = trust.event_of(body.accepted, bool(body.audited_groups), body.reasons)
        assert event is not None, "simulated validators have no faults"
        if not body.accepted:
            self._reject(file, body, event)
        elif file.verdict is not None:
            self._confirm(file, body, event)
        elif self._differs(file, body) and self._audit_both(file):
            return True
        else:
            self._accept(file, body, event)
        return True

    def _close(self, file: File, body: api.VerdictBody) -> None:
        self._move(file, SubmissionState.DECIDED)
        file.verdict = body

    def _accept(self, file: File, body: api.VerdictBody, event: trust.TrustEvent) -> None:
        key, lease = file.lease.key, file.lease
        self._record_delivery(file, sum(group.tokens for group in body.groups))
        usable = trust.is_usable(key.trust, self.trust)
        counts = usable and lease.slot.state is SlotState.SUBMITTED
        if counts:
            slots.move_slot(self.tables, lease.slot, SlotState.RESOLVED, lease)
        elif not usable:
            slots.release_slot(self.tables, lease)
        self._close(file, body)
        key.accepted += 1
        if counts:
            for group in body.groups:
                if group.useful:
                    slots.add_group(self.tables, self._group(lease, body, group), file)
        if counts or not usable:
            self._note(key, event, body)
        self._decided(file)

    def _record_delivery(self, file: File, tokens: int) -> None:
        key, lease, pace = file.lease.key, file.lease, self.leasing.observer.observe().pace
        record = deliveries.after_delivery(key.record, file.received_at - lease.issued_at, pace)
        busy_s = file.received_at - max(lease.issued_at, key.received_at)
        key.record = deliveries.after_tokens(record, tokens, busy_s)
        key.received_at, key.delivered_at = max(key.received_at, file.received_at), self.clock()
        self.leasing.observer.delivered(key)

    def _group(self, lease: Lease, body: api.VerdictBody, group: api.GroupVerdict) -> batches.GroupView:
        return batches.GroupView(
            step=lease.step,
            slot=lease.slot.number,
            number=group.group,
            group_id=group_name(StepId(0, lease.step, 0), lease.slot.number, group.group),
            policy_version=lease.version,
            deferred=lease.slot.deferred,
            worker=lease.key.key,
            audited=group.group in body.audited_groups,
        )

    def _confirm(self, file: File, body: api.VerdictBody, event: trust.TrustEvent) -> None:
        """An audit of everything in a file that counts was clean."""
        self._close(file, body)
        for name in file.waiting:
            group = self.tables.groups[name]
            file.lease.key.waiting_unaudited -= not group.audited
            self.tables.groups[name] = replace(group, audited=True)
        self._note(file.lease.key, event, body)
        self._decided(file)

    def _note(self, key: Key, event: trust.TrustEvent, body: api.VerdictBody) -> None:
        share = len(body.audited_groups) / self.config.rollouts.tasks_per_slot
        self.set_trust(key, trust.after(key.trust, event, self.trust, share))

    def set_trust(self, key: Key, record: trust.TrustRecord) -> None:
        key.trust = record
        self.leasing.observer.changed(key)

    def _differs(self, file: File, body: api.VerdictBody) -> bool:
        counting = self._counting(file)
        if counting is None or counting.verdict is None:
            return False
        return not duplicates.agree(_content(counting.verdict), _content(body))

    def _counting(self, file: File) -> File | None:
        """Another file that fills the same slot."""
        slot = file.lease.slot
        if slot.state is not SlotState.RESOLVED or slot.lease is None or slot.lease is file.lease:
            return None
        other = slot.lease.file
        return other if other is not None and other.state is SubmissionState.DECIDED else None

    def _audit_both(self, file: File) -> bool:
        counting, waits = self._counting(file), self._audit_in_full(file)
        if counting is not None:
            self._audit_in_full(counting)
        return waits

    def _audit_in_full(self, file: File) -> bool:
        everything = list(range(self.config.rollouts.tasks_per_slot))
        if file.audit_groups == everything:
            return False
        file.audit_groups = everything
        self._wait_again(file)
        return True

    def _reject(self, file: File, body: api.VerdictBody, event: trust.TrustEvent) -> None:
        key = file.lease.key
        self._close(file, body)
        slots.release_slot(self.tables, file.lease)
        self._withdraw(file)
        self._decided(file)
        self.leasing.fail(key)
        key.rejected += 1
        record = trust.after(key.trust, event, self.trust)
        if record.state == "banned" and key.trust.state != "banned":
            self.ban(key)
        else:
            self.set_trust(key, record)

    def _withdraw(self, file: File) -> None:
        for name in list(file.waiting):
            slots.remove_group(self.tables, self.tables.groups[name])
        for batch in self.tables.batches[-self.config.training.async_level - 2 :]:
            for name in file.proposed.intersection(batch.files):
                del batch.files[name], batch.groups[name]
        file.proposed.clear()

    def ban(self, key: Key) -> None:
        key.banned_at = self.clock()
        self.set_trust(key, replace(key.trust, state="banned"))
        self.tables.by_delivery.pop(key.key, None)
        self.leasing.presence.forget_banned(key.key)
        for file in list(key.files.values()):
            self._withdraw(file)
            if file.state in UNDECIDED:
                self._move(file, SubmissionState.VOID)
            self._decided(file)
        for lease in [*key.leased.values(), *self._submitted(key)]:
            slots.drop_lease(self.tables, lease, LeaseState.VOID)
        now = self.tables.step
        for slot in [*self.tables.of_step(now).slots, *self.tables.of_step(now + 1).slots]:
            counting = slot.lease
            if slot.state is SlotState.RESOLVED and counting is not None and counting.key is key:
                slots.move_lease(self.tables, counting, LeaseState.VOID)
                slots.move_slot(self.tables, slot, SlotState.VOID, counting)

    def _submitted(self, key: Key) -> list[Lease]:
        """Leases of slots that are not filled yet."""
        return [
            lease
            for step in self.tables.steps.values()
            for slot in step.slots
            if slot.state in FILLING
            for lease in slot.leases
            if lease.key is key and lease.state is LeaseState.SUBMITTED
        ]


def _content(body: api.VerdictBody) -> duplicates.Content:
    samples = {
        (group.group, number): digest
        for group in body.groups
        for number, (_, digest) in enumerate(zip_longest(group.rewards, group.samples, fillvalue=""))
    }
    return duplicates.Content(samples, body.flips_allowed)
