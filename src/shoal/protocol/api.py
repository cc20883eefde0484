"""The typed bodies of the coordinator's HTTP API; the OpenAPI page is made from them.

Requests forbid unknown fields and bound every length. Answers tolerate unknown fields, so that an older worker can talk to
a newer coordinator of the same protocol version.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from shoal.files import Digest
from shoal.protocol.verdicts import Reason

PublicKey = Digest
ClientId = Annotated[str, Field(pattern=r"^[0-9a-zA-Z_-]{8,64}$")]
Count = Annotated[int, Field(ge=0, le=1 << 53)]
SAMPLE_DIGEST_CHARS = 16
SampleDigest = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{SAMPLE_DIGEST_CHARS}}}$")]
ShortText = Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
"""Shown on terminals, so it holds no control characters."""
Metric = Annotated[float, Field(allow_inf_nan=True)] | int | str | None
"""A metric of a training step. JSON has no NaN: one that is not a number travels as null."""
WorkerState = Literal["registered", "probation", "active", "suspect", "quarantined", "gone", "banned"]
OwnerState = Literal["running", "paused", "draining"]
"""What the owner asks a run to be."""
RunState = Literal["running", "paused", "draining", "drained", "finished"]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)


class Refusal(Answer):
    code: str
    message: str
    hint: str = ""
    permanent: bool = False
    """Whether the same request would be refused again."""


class RegisterBody(Body):
    name: ShortText
    numerics_class: ShortText
    tokens_per_s: Annotated[float, Field(gt=0, lt=1e9)]
    memory_bytes: Count = 0
    """Of the whole machine; 0 if unknown."""
    link_bytes_per_s: Annotated[float, Field(ge=0, lt=1e12)] = 0.0
    """Measured while the first weights came in; 0 if they were already there."""


class WorkerView(Answer):
    key: str
    name: str
    state: WorkerState
    reason: str = ""
    credit_held: int = 0
    credit_released: int = 0
    submissions_accepted: int = 0
    submissions_rejected: int = 0
    last_seen_s: float = 0.0
    activity: str = ""
    tokens_per_s: float = 0.0
    memory_bytes: int = 0
    link_bytes_per_s: float = 0.0
    banned_at_s: float | None = None
    """Seconds since the run began."""


class HeartbeatBody(Body):
    activity: ShortText
    tokens_generated: Count = 0
    bytes_received: Count = 0
    ledger_head: Annotated[str, Field(max_length=2048)] = ""
    """The newest signed head of the ledger that the worker has kept."""


class HeartbeatAnswer(Answer):
    worker: WorkerView
    relay_urls: list[str]
    interval_s: float = 5.0
    """When the next heartbeat is expected."""
    ledger_head: str = ""
    """The head of the ledger, signed, for the worker to keep."""
    epoch: int = 0
    """Leases of earlier epochs are void."""
    kept_head: Literal["known", "restored", "unknown"] = "known"
    """Whether the ledger has the head that the worker reported, lost it by a restore, or does not know it."""


class LeaseAddress(Body):
    lease_id: str


class LeaseBody(Body):
    request_id: ClientId
    held_versions: Annotated[list[Count], Field(max_length=64)]


class Lease(Answer):
    lease_id: str
    epoch: int = 0
    step: int
    attempt: int = 0
    slot: int
    slot_seed: str
    policy_version: int
    manifest_digest: str
    expires_at: float
    by_bucket: bool = False
    """Whether the rollouts are to be uploaded by a URL that the coordinator gives out."""


class LeaseAnswer(Answer):
    lease: Lease | None = None
    reason: Literal[
        "granted", "no_work", "need_weights", "waiting_for_trainer", "paused", "draining", "disk_full", "finished"
    ] = "granted"
    retry_after_s: float = 0.5
    wanted_version: int = 0


class UploadBody(Body):
    """Announces the file of a lease, and later says that it is in the bucket."""

    lease_id: ShortText
    digest: Digest
    size_bytes: Annotated[int, Field(gt=0, le=1 << 40)]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


class UploadAnswer(Answer):
    url: str
    """Where these bytes, and no others, may be put; empty if the coordinator takes them itself."""


class SubmissionAnswer(Answer):
    submission_id: str
    state: str
    receipt: str = ""
    """Signed by the coordinator: this file arrived. Keep it until the ledger has a verdict on it."""


class SubmissionAddress(Body):
    submission_id: str


class ClaimBody(Body):
    request_id: ClientId
    wait_s: Annotated[float, Field(ge=0, le=30)] = 20


class Claim(Answer):
    claim_id: str
    submission_id: str
    worker_key: str
    digest: str
    lease: Lease
    audit_groups: list[int]
    """Groups that the audit draw, or a doubt, has chosen."""
    audit_order: list[int] = []
    """All groups, in the order in which more of them are audited."""
    unaudited_limit: Annotated[int, Field(ge=0)] = 1 << 20
    """How many groups that carry a training signal may stay without an audit."""
    numerics_class: str = ""
    """Under which the worker was registered when the file arrived; empty if it was not noted."""


class ClaimAnswer(Answer):
    claim: Claim | None = None
    run_state: str


class GroupVerdict(Body):
    group: Count
    task_id: ShortText
    useful: bool
    tokens: Count
    rewards: Annotated[list[float], Field(max_length=1024)]
    task_rewards: Annotated[list[float], Field(max_length=1024)]
    samples: Annotated[list[SampleDigest], Field(max_length=1024)] = []
    """Digests of their tokens: two files of one slot are compared by them."""


class AuditMetrics(Body):
    """What an audit measured; the evidence behind its verdict."""

    tokens: Count = 0
    margin_max: float = 0.0
    margin_sum: float = 0.0
    rounding_flips: Count = 0
    exponent_mismatches_max: Count = 0
    mantissa_mean_max: float = 0.0
    logprob_error_max: float = 0.0
    drift_llr: float = 0.0
    """Log-likelihood ratio of numerics coarser than honest ones; the coordinator adds it up per worker."""


class VerdictBody(Body):
    claim_id: ClientId
    submission_id: ClientId
    accepted: bool
    reasons: Annotated[list[Reason], Field(max_length=16)]
    detail: Annotated[str, Field(max_length=2000)] = ""
    audited_groups: Annotated[list[Count], Field(max_length=4096)] = []
    """Groups that were computed again with the policy."""
    groups: Annotated[list[GroupVerdict], Field(max_length=4096)] = []
    metrics: AuditMetrics = AuditMetrics()
    flips_allowed: Count = 0
    """Samples that may differ by rounding from those of another honest file of the same slot."""
    seconds: Annotated[float, Field(ge=0)] = 0.0


class VerdictAnswer(Answer):
    recorded: bool


class BatchGroup(Answer):
    group_id: str
    submission_id: str
    digest: str
    group: int
    policy_version: int
    rewards: list[float]
    task_rewards: list[float]
    logprobs_verified: bool


class BatchRecord(Answer):
    epoch: int = 0
    step: int
    state: Literal["proposed", "recorded"] = "recorded"
    """A proposed batch may still lose groups; a recorded one is what every resume trains on."""
    attempt: int = 0
    """How many lists of this step were proposed before."""
    groups: list[BatchGroup]
    dropped: dict[str, int]
    """Groups of this step that the batch does not hold, by reason."""
    generated_groups: int
    generated_reward_mean: float | None = None
    """Over all samples that were accepted for this step when the batch was proposed, useful or not; none if there were none."""
    generated_task_reward_mean: float | None = None


class BatchAddress(Body):
    step: Count
    epoch: Count = 0
    """In which the trainer trains; another one is refused."""
    wait_s: Annotated[float, Field(ge=0, le=30)] = 0.0
    """How long to wait for the batch."""


class BatchAnswer(Answer):
    batch: BatchRecord | None = None
    waiting_for: str = ""
    run_state: str = "running"


class ScreeningBody(Body):
    epoch: Count = 0
    step: Count
    attempt: Count
    statistics: dict[ShortText, float]
    """Of each group of the proposed batch; how far its log-probability lies from what the trainer's policy expects."""


class RecallBody(Body):
    epoch: Count | None = None
    """In which the trainer trains; none for the current one."""
    step: Count
    attempt: Count | None = None
    """The list that was trained on; none for whichever there is."""
    reason: Annotated[ShortText, Field(min_length=1)]
    """Recorded in the ledger, for everybody to read."""


class RecallAnswer(Answer):
    groups: int
    """How many are audited now."""


class VersionBody(Body):
    epoch: Count = 0
    version: Count
    manifest_digest: Digest
    weights_digest: Digest
    bytes_total: Count
    report: dict[str, Metric] = {}
    """Metrics of the training step that made this version."""
    checkpoints: Annotated[list[Count], Field(max_length=1024)] | None = None
    """Steps that the trainer can resume: batches from the first one on may be asked for again."""


class VersionAnswer(Answer):
    ledger_head: str
    """Signed by the coordinator; the head that announces the version carries it."""


class RunStateBody(Body):
    state: OwnerState


class RunStateAnswer(Answer):
    run_state: RunState
    step: int
    newest_version: int
    leases_outstanding: int
    submissions_pending: int


class BanBody(Body):
    worker: PublicKey
    reason: Annotated[ShortText, Field(min_length=1)]
    """Recorded in the ledger, for everybody to read."""


class RewindBody(Body):
    """What the owner asks for: everything after a version becomes void."""

    epoch: Annotated[int, Field(gt=0, le=1 << 53)]
    """The one that begins; a repeated request has the same."""
    version: Count
    manifest_digest: Digest
    """Of that version."""
    reason: Annotated[ShortText, Field(min_length=1)]
    """Recorded in the ledger, for everybody to read."""
    audit: bool = False
    """Whether everything that the voided steps were trained on is audited in full."""
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
    """By the run key; the ledger keeps it."""


class RewindView(Answer):
    epoch: int
    version: int
    """That the run returned to."""
    newest_before: int
    """Versions up to this one became void."""
    groups: int
    """That were withdrawn; their credit stays."""
    audits: int
    """Files that were sent to a full audit."""
    at: float
    reason: str

    @property
    def lost_steps(self) -> int:
        return self.newest_before - self.version


class LineAnswer(Answer):
    """Which versions and checkpoints count."""

    epoch: int = 0
    newest_version: int = -1
    checkpoints: list[int] = []
    """As the trainer reported with the newest version."""
    rewinds: list[RewindView] = []
    ledger_head: str = ""
    """Signed by the coordinator."""


class EvaluationBody(Body):
    version: Count
    accuracy: Annotated[float, Field(ge=0, le=1)]
    problems: Count
    samples: Count
    mean_tokens: float
    seconds: float
    manifest_digest: Digest | Literal[""] = ""
    """Of the version that was measured."""


class RelayBody(Body):
    url: Annotated[str, Field(pattern=r"^https?://[^\s]{1,200}$")]
    exchanges: bool = False
    """Whether it brings shards in from outside the list of relays and gives them to the others."""
    newest_version: Annotated[int, Field(ge=-1, le=1 << 53)] = -1
    bytes_sent: Count = 0
    bytes_received: Count = 0


class RelayView(Answer):
    key: str
    url: str
    exchanges: bool = False
    newest_version: int
    bytes_sent: int
    bytes_received: int
    last_seen_s: float
    success: float | None = None
    """Share of its answers that were right and complete, as its clients report; none before enough of them did."""
    reporters: int = 0
    """Clients that this share is the mean of."""


class RelaysAnswer(Answer):
    relays: list[RelayView]
    origin_url: str
    is_listed: bool = False
    """Whether the relay that announced itself has a place in the list."""


class RelayMeasurement(Body):
    """How one relay served since the last report."""

    url: Annotated[str, Field(max_length=220)]
    is_good: bool
    """Bytes came, they were the right ones, and more requests succeeded than failed."""
    served: Count = 0
    """Requests that were answered with the right bytes."""
    failed: Count = 0
    """Requests that were not answered, or with other bytes."""


class RelayReportBody(Body):
    relays: Annotated[list[RelayMeasurement], Field(max_length=32)]


class VersionView(Answer):
    epoch: int = 0
    version: int
    manifest_digest: str
    published_s: float
    report: dict[str, Metric]


class EvaluationView(EvaluationBody):
    model_config = ConfigDict(extra="ignore")
    at_s: float


class VerdictView(Answer):
    """What everybody may know of a verdict: neither its slot, which would show who has a backup lease, nor whether it was drawn."""

    at_s: float
    worker: str
    step: int
    accepted: bool
    reasons: list[str]


class AlertView(Answer):
    name: str
    seen: str
    means: str
    threshold: float
    advice: str


class LeaseTimingView(Answer):
    """When work is leased, and what was measured for it."""

    reason: Literal["measuring", "trainer_waits", "swarm_too_slow", "waits_for_version", "late"]
    step: int
    newest_version: int
    oldest_version: int
    """Leases of the step use no older one for now."""
    waits_s: float | None = None
    """How long leases still wait for that version at most."""
    cycles: int = 0
    """Measured ones."""
    slowest_fill_s: float = 0.0
    """From the first lease of a step until its batch was formed."""
    fastest_train_s: float = 0.0
    publish_s: float = 0.0
    useful_share: float | None = None
    """Of generated groups, if the batch is filled without a surplus."""


class StatusView(Answer):
    run_id: str
    run_state: str
    uptime_s: float
    epoch: int = 0
    """How often the run was rewound."""
    step: int
    steps: int
    async_level: int
    newest_version: int
    useful_groups: int
    groups_needed: int
    slots_open: int
    submissions_pending: int
    workers: list[WorkerView]
    """Everybody in a small swarm, the most productive of a large one."""
    worker_counts: dict[str, int]
    """All workers by state."""
    relays: list[RelayView]
    verdicts: dict[str, int]
    recent_verdicts: list[VerdictView]
    age_histogram: dict[int, int]
    """Consumed groups by step − policy version."""
    ledger_entries: int
    ledger_head: str
    rollouts_collected: int = 0
    """Rollout files that the retention policy has removed."""
    disk_free_bytes: int | None = None
    takes_work: bool = True
    """False while the coordinator's disk is too full."""
    starving: str = "unknown"
    """Who waits: none, trainer, workers, weights, validators, or unknown."""
    advice: str = ""
    """What to add, in one sentence."""
    workers_needed: int | None = None
    """Workers of the observed speed that keep the trainer busy."""
    workers_present: int = 0
    validators_needed: int | None = None
    """At what they take for a file."""
    validators_present: int = 0
    """That decided something lately."""
    relays_needed: int | None = None
    """Of 1,000 Mbit/s each, so that all workers get every version in the time of a step, ..."""
    relays_mbit_s: float | None = None
    """... and what they send together."""
    alerts: list[AlertView] = []
    lease_timing: LeaseTimingView | None = None
    """None where leases never wait, and before the first request for work."""


class TaskStatistics(Answer):
    """Over all tasks that accepted groups were about."""

    tasks: int = 0
    groups: int = 0
    useful: int = 0
    """Groups whose task rewards were not all equal."""
    samples: int = 0
    solved: int = 0
    by_solve_rate: dict[str, int] = {}
    """Tasks never solved, solved in 0–10 % of their samples … always solved."""


class HistoryView(Answer):
    versions: list[VersionView]
    evaluations: list[EvaluationView]
    batches: list[dict[str, float | int]]
    bans: list[WorkerView]
    rewinds: list[RewindView] = []
    tasks: TaskStatistics = TaskStatistics()
