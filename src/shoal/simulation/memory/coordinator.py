"""A coordinator in memory: the operations of `simulation.coordinator.LocalCoordinator`, without a database and without HTTP.

Every decision is made by `coordinator.rules`; tests keep both coordinators in agreement. It holds the last steps only, so that a
long simulation needs no more memory than a short one.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from shoal.config import ShoalConfig
from shoal.coordinator.housekeeping import ABSENT_STATES
from shoal.coordinator.rules import batches, leases, trust
from shoal.coordinator.rules.deliveries import Pace
from shoal.coordinator.states import LeaseState, SlotState
from shoal.errors import RefusedError
from shoal.files import digest_bytes
from shoal.protocol import api
from shoal.simulation.coordinator import NUMERICS_CLASS
from shoal.simulation.memory import slots
from shoal.simulation.memory.files import Files
from shoal.simulation.memory.leasing import Leasing
from shoal.simulation.memory.models import made
from shoal.simulation.memory.refusals import poll_s, wait_s
from shoal.simulation.memory.tables import Batch, File, Key, Tables, Version
from shoal.simulation.operations import TrainedGroup

KEPT_STEPS = 8
"""Behind the asynchrony window: files that come later are of no use to any batch."""
NOT_AT_WORK = frozenset(("registered", "gone", "banned"))
"""A request of such a key changes its state, or is refused for good."""


class MemoryCoordinator:
    def __init__(self, config: ShoalConfig, clock: Callable[[], float], secret: bytes) -> None:
        self.config, self.clock = config, clock
        self.tables = Tables()
        self.leasing = Leasing(self.tables, config, clock, secret)
        self.files = Files(self.tables, self.leasing, config, clock, secret)
        self.presence = self.leasing.presence

    # Workers

    def register(self, key: str, tokens_per_s: float = 1e6, numerics_class: str = NUMERICS_CLASS) -> None:
        if key not in self.tables.keys:
            self.tables.keys[key] = Key(key, numerics_class, trust.TrustRecord("registered"))
        self._mark_seen(self._require(key))

    def _require(self, key: str) -> Key:
        worker = self.tables.keys[key]
        if worker.trust.state == "banned":
            raise RefusedError("banned", "This key is banned.", status=403, permanent=True)
        return worker

    def _mark_seen(self, worker: Key) -> None:
        self.presence.seen(worker.key)
        if worker.trust.state == "gone":
            self.files.set_trust(worker, trust.after(worker.trust, "returned", self.config.trust))

    def lease(self, key: str, request_id: str, held_versions: Sequence[int]) -> api.LeaseAnswer:
        worker = self._require(key)
        was_absent = worker.trust.state in ("gone", "registered")
        if was_absent:
            self._returned(worker)
        answer = self._answer(worker, request_id, tuple(held_versions))
        # As in the store, presence learns of a request when it is answered.
        if was_absent:
            self.presence.seen(key)
        self.presence.asked(worker, self.clock())
        return answer

    def _answer(self, worker: Key, request_id: str, held_versions: tuple[int, ...]) -> api.LeaseAnswer:
        now = self.clock()
        common = self.leasing.common_refusal(worker, held_versions, now)
        if common is not None:
            polling = self.presence.polling_at(now, has_delivered=worker.delivered_at > 0)
            return _refused(common.reason, wait_s(common, polling), common.wanted_version or 0)
        decision = self.leasing.decide(worker, held_versions)
        if isinstance(decision, leases.Refused):
            return _refused(decision.reason, decision.retry_after_s, decision.wanted_version or 0)
        granted = self.leasing.grant(worker, request_id, decision)
        view = self.leasing.lease_view(granted, self.files.secret_of(granted.step))
        return made(
            api.LeaseAnswer, lease=view, reason="granted", retry_after_s=0.5, wanted_version=decision.wanted_version
        )

    def refuse(self, key: str, held_versions: tuple[int, ...], now: float) -> tuple[str, float] | None:
        """Reason and wait, for a request that is answered like those of all keys of a kind; else it must be decided."""
        worker = self.tables.keys[key]
        if worker.trust.state in NOT_AT_WORK:
            return None
        refused = self.leasing.common_refusal(worker, held_versions, now)
        if refused is None:
            return None
        alone_s, among_others_s = refused.retry_after_s, poll_s(self.presence.polling_and_asked(worker, now))
        return refused.reason, alone_s if alone_s > among_others_s else among_others_s

    def _returned(self, worker: Key) -> None:
        for state, event in (("gone", "returned"), ("registered", "asked")):
            if worker.trust.state == state:
                self.files.set_trust(worker, trust.after(worker.trust, event, self.config.trust))  # type: ignore[arg-type]

    def give_back(self, key: str, lease_id: str) -> None:
        lease = self.tables.leases.get(lease_id)
        if lease is not None and lease.key.key == key:
            self.leasing.drop(lease, LeaseState.RETURNED)

    def submit(self, key: str, lease_id: str, content: bytes) -> None:
        worker, name = self._require(key), digest_bytes(lease_id.encode())[:32]
        self.files.accept(worker, lease_id, name, digest_bytes(content))
        self.presence.seen(key)

    def beat(self, keys: Iterable[str]) -> None:
        """All keys but those that left send a heartbeat."""
        self.presence.beat_at = self.clock()

    def leave(self, key: str) -> None:
        """The key sends nothing more."""
        self.presence.leave(key, self.tables.keys[key].asked_at)

    def rejoin(self, key: str) -> None:
        self.presence.rejoin(key)
        self._mark_seen(self._require(key))

    # Validators and the trainer

    def claim(self, validator: str, request_id: str) -> api.Claim | None:
        return self.files.claim()

    def verdict(self, body: api.VerdictBody) -> bool:
        is_recorded = self.files.decide(body)
        if is_recorded:
            self._advance()
        return is_recorded

    def _advance(self) -> None:
        """Proposes the batch of the current step if it is complete."""
        step, training = self.tables.step, self.config.training
        if step >= self.config.run.steps:
            return
        counts = self.leasing.counts(step)
        if not batches.may_be_complete(counts, training):
            return
        oldest = batches.oldest_version(step, training)
        is_short = slots.ready_groups(self.tables, step, oldest) < training.groups_per_step
        if is_short and counts.outstanding_groups:  # with nothing on its way the rule may take less
            return
        first = slots.first_blocking(self.tables.of_step(step))
        blocking = [] if first is None else [first]
        view = batches.StepView(step, counts, list(self.tables.groups.values()), blocking)
        batch = batches.decide(view, training, self.config.trust)
        if batch is not None:
            self._propose(step, counts, batch)

    def _propose(self, step: int, counts: batches.StepCounts, batch: batches.Batch) -> None:
        for group in batch.expired:
            self.files.forget(slots.remove_group(self.tables, group))
        files: dict[str, File] = {}
        for group in batch.groups:
            files[group.group_id] = slots.remove_group(self.tables, group)
            files[group.group_id].proposed.add(group.group_id)
        groups = {group.group_id: group for group in batch.groups}
        generated, useful = counts.resolved_groups, counts.useful_of_step
        self.tables.revision += 1
        self.tables.batches.append(Batch(step, self.clock(), generated, useful, groups, files, len(batch.expired)))
        for slot in list(self.tables.of_step(step).open_slots.values()):
            slots.move_slot(self.tables, slot, SlotState.CLOSED, None)
        self._forget_steps(step - self.config.training.async_level - KEPT_STEPS)

    def _forget_steps(self, before: int) -> None:
        for step in [step for step in self.tables.steps if step < before]:
            slots.take_apart(self.tables.steps.pop(step))
            self.tables.waited_for.pop(step, None)
        for worker in self.tables.keys.values() if before > 0 and before % KEPT_STEPS == 0 else ():
            for step in [step for step in worker.holding if step < before]:
                del worker.holding[step]

    def record(self, step: int) -> None:
        """The trainer finds nothing improbable: what is left of the proposal is final."""
        batch = self.tables.batches[step]
        batch.trained, batch.is_recorded = _trained(batch), True
        for name, file in batch.files.items():
            file.proposed.discard(name)
            self.files.forget(file)
        batch.groups, batch.files = {}, {}

    def publish(self, version: int, stage_s: float = 0.0, waited_s: float = 0.0, size_bytes: int = 1) -> None:
        assert version == len(self.tables.versions), "versions follow each other"
        self.tables.versions.append(Version(version, self.clock(), stage_s))
        self.tables.largest_version_bytes = max(self.tables.largest_version_bytes, size_bytes)
        self.tables.revision += 1

    def maintain(self) -> None:
        self.leasing.expire()
        for key in self.presence.silent():
            self._mark_gone(self.tables.keys[key])
        self.files.release_claims()
        self._advance()

    def _mark_gone(self, worker: Key) -> None:
        self.presence.forget_silent(worker.key)
        if worker.trust.state in ABSENT_STATES:
            return
        self.files.set_trust(worker, trust.after(worker.trust, "silent", self.config.trust))
        for lease in list(worker.leased.values()):
            self.leasing.drop(lease, LeaseState.ABANDONED)

    # What happened

    def step(self) -> int:
        return self.tables.step

    def trained(self, step: int) -> list[TrainedGroup]:
        batch = self.tables.batches[step]
        return batch.trained if batch.is_recorded else _trained(batch)

    def is_reliable(self, key: str) -> bool:
        return self.leasing.observer.is_reliable(self.tables.keys[key], self.leasing.observer.observe())

    def pace(self) -> Pace:
        return self.leasing.observer.observe().pace

    def close(self) -> None:
        """Nothing is open."""


@lru_cache(maxsize=1 << 12)
def _refused(reason: str, retry_after_s: float, wanted_version: int) -> api.LeaseAnswer:
    return made(api.LeaseAnswer, lease=None, reason=reason, retry_after_s=retry_after_s, wanted_version=wanted_version)


def _trained(batch: Batch) -> list[TrainedGroup]:
    return [_trained_group(group, batch.files[name]) for name, group in batch.groups.items()]


def _trained_group(group: batches.GroupView, file: File) -> TrainedGroup:
    assert file.verdict is not None, "groups come from verdicts"
    verdict = file.verdict.groups[group.number]
    return TrainedGroup(file.submission_id, group.worker, group.policy_version, verdict.tokens, verdict.task_rewards[0])
