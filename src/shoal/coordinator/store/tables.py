"""The tables of the store as records; `schema` has the same columns in SQL."""

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from shoal.coordinator import states
from shoal.coordinator.states import BatchState, GroupState, LeaseState, Machine, SlotState, SubmissionState
from shoal.coordinator.store.rows import Record
from shoal.protocol.api import WorkerState
from shoal.protocol.steps import StepId, VersionId


@dataclass(frozen=True, slots=True)
class WorkerRow(Record):
    table: ClassVar[str] = "workers"
    key_columns: ClassVar[tuple[str, ...]] = ("key",)
    is_remembered: ClassVar[bool] = True

    key: str
    name: str
    numerics_class: str
    tokens_per_s: float
    memory_bytes: int
    link_bytes_per_s: float
    registered_at: float
    state: WorkerState = "registered"
    reason: str = ""
    """Of a ban."""
    clean_audits: float = 0.0
    anomalies: int = 0
    drift: float = 0.0
    """Total of the sequential test; `drift_sums` has its parts (`rules.drift`)."""
    accepted: int = 0
    rejected: int = 0
    credit_held: int = 0
    credit_released: int = 0
    banned_at: float | None = None
    in_time: float = 0.0
    """This and what follows is the record of deliveries; see `rules.deliveries.Record`."""
    missed: float = 0.0
    failures: int = 0
    failed_at: float = 0.0
    work_s: float = 0.0
    lag_s: float = -1.0
    delivered_at: float = 0.0
    newest_used: int = -1
    """The newest version that it was leased."""
    tokens: float = 0.0
    busy_s: float = 0.0
    slot_tokens: float = 0.0
    received_at: float = 0.0
    """Of its newest accepted file."""
    drift_sums: str = "[]"


@dataclass(frozen=True, slots=True)
class DeliveringKey:
    """What a lease needs to know about each key that delivered lately."""

    key: str
    numerics_class: str
    state: WorkerState
    clean_audits: int
    anomalies: int
    in_time: float
    missed: float
    failures: int
    failed_at: float
    work_s: float
    lag_s: float
    tokens: float
    busy_s: float
    slot_tokens: float
    delivered_at: float


@dataclass(frozen=True, slots=True)
class SlotRow(Record):
    table: ClassVar[str] = "slots"
    key_columns: ClassVar[tuple[str, ...]] = ("epoch", "step", "slot")
    machine: ClassVar[Machine[Any] | None] = states.SLOT

    step: int
    slot: int
    state: SlotState
    lease_id: str | None
    """The lease whose file counts, or that was granted first."""
    attempts: int
    policy_version: int
    numerics_class: str
    deferred: bool
    """Whether no batch waits for it, and its groups enter the batch of the next step."""
    due_at: float
    """When another key gets it too, if no file has come by then."""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class LeaseRow(Record):
    table: ClassVar[str] = "leases"
    key_columns: ClassVar[tuple[str, ...]] = ("lease_id",)
    machine: ClassVar[Machine[Any] | None] = states.LEASE

    lease_id: str
    request_id: str
    worker: str
    step: int
    slot: int
    policy_version: int
    manifest_digest: str
    issued_at: float
    expires_at: float
    state: LeaseState
    by_active_key: bool
    """Whether the key had left probation when it took the lease."""
    epoch: int = 0
    attempt: int = 0

    @property
    def step_id(self) -> StepId:
        return StepId(self.epoch, self.step, self.attempt)


@dataclass(frozen=True, slots=True)
class SubmissionRow(Record):
    table: ClassVar[str] = "submissions"
    key_columns: ClassVar[tuple[str, ...]] = ("submission_id",)
    machine: ClassVar[Machine[Any] | None] = states.SUBMISSION

    submission_id: str
    lease_id: str
    worker: str
    digest: str
    size_bytes: int
    signature: str
    received_at: float
    audit_groups: str
    """Numbers of the groups that were drawn."""
    audit_step: int
    audit_rate: float
    numerics_class: str
    state: SubmissionState = SubmissionState.PENDING
    claim_id: str | None = None
    claimed_by: str | None = None
    claim_request: str | None = None
    claim_expires: float | None = None
    tries: int = 0
    faults: int = 0
    retry_at: float = 0.0
    decided_at: float | None = None
    verdict: str | None = None
    collected_at: float | None = None
    unaudited_limit: int = 0
    """How many of its useful groups may stay without an audit, as its claim says."""
    audit_epoch: int = 0
    audit_attempt: int = 0
    position: int = 0
    """Entries that the ledger had when the file arrived."""
    paid: int = 0
    """Tokens that its slot was paid for, if it fills its slot."""
    useful_rate: float = 0.0
    """Share of its useful groups that is audited at least."""

    @property
    def audit_id(self) -> StepId:
        """The step whose secret draws the audit: the current one when the file arrived."""
        return StepId(self.audit_epoch, self.audit_step, self.audit_attempt)

    @property
    def groups_to_audit(self) -> list[int]:
        return list(json.loads(self.audit_groups))


@dataclass(frozen=True, slots=True)
class GroupRow(Record):
    table: ClassVar[str] = "groups"
    key_columns: ClassVar[tuple[str, ...]] = ("group_id",)
    machine: ClassVar[Machine[Any] | None] = states.GROUP

    group_id: str
    submission_id: str
    worker: str
    step: int
    slot: int
    number: int
    policy_version: int
    useful: bool
    tokens: int
    rewards: str
    task_rewards: str
    logprobs_verified: bool
    state: GroupState
    deferred: bool = False
    batch_step: int | None = None
    position: int | None = None
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class BatchRow(Record):
    table: ClassVar[str] = "batches"
    key_columns: ClassVar[tuple[str, ...]] = ("step",)
    machine: ClassVar[Machine[Any] | None] = states.BATCH

    step: int
    formed_at: float
    groups: int
    generated: int
    dropped: str
    ages: str
    state: BatchState = BatchState.PROPOSED
    attempt: int = 0
    """How many lists of this step were proposed before."""
    epoch: int = 0
    useful: int = 0
    """Of the generated groups, those that could be trained on."""
    reward_mean: float | None = None
    """Over all samples that were generated for the step, useful or not; none if there were none."""
    task_reward_mean: float | None = None


@dataclass(frozen=True, slots=True)
class VersionRow(Record):
    table: ClassVar[str] = "versions"
    key_columns: ClassVar[tuple[str, ...]] = ("version",)

    version: int
    manifest_digest: str
    weights_digest: str
    bytes_total: int
    published_at: float
    report: str
    epoch: int = 0
    """In which it was made; its number may have named other weights before."""

    @property
    def identity(self) -> VersionId:
        return VersionId(self.epoch, self.version, self.manifest_digest)


@dataclass(frozen=True, slots=True)
class RewindRow(Record):
    """How an epoch began. Batches and versions that it voided are in the ledger only."""

    table: ClassVar[str] = "rewinds"
    key_columns: ClassVar[tuple[str, ...]] = ("epoch",)

    epoch: int
    version: int
    newest_before: int
    groups: int
    """That were withdrawn."""
    audits: int
    """Files that were sent to a full audit."""
    at: float
    reason: str


@dataclass(frozen=True, slots=True)
class EvaluationRow(Record):
    table: ClassVar[str] = "evaluations"
    key_columns: ClassVar[tuple[str, ...]] = ("version",)

    version: int
    at: float
    body: str
