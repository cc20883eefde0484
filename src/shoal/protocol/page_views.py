"""The answers that feed the page: curves, workers, one contributor, the ledger; and, for the owner, rollouts and the timeline.

Public answers hold no drift, margin, audit rate or draw of the open step, no slot seed, no backup lease and no rollout text.
Owner's answers begin with `Owner`.
"""

from typing import Annotated, Any

from pydantic import Field

from shoal.protocol.api import Answer, Body, ClientId, Count, PublicKey, WorkerView
from shoal.protocol.steps import STEP_PATTERN

Value = float | None
Secret = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class SessionBody(Body):
    secret: Secret


class SessionView(Answer):
    is_owner: bool
    run_id: str
    is_live: bool
    """False for a page on the files of a run that is not served."""
    coordinator_url: str
    run_key: str


class LinkAnswer(Answer):
    secret: str


class TraceRow(Body):
    """One completion of an audit, token by token."""

    group: Count
    sample: Count
    margins: Annotated[list[float], Field(max_length=1 << 17)]
    entropies: Annotated[list[float], Field(max_length=1 << 17)]


class AuditTrace(Body):
    submission_id: ClientId
    rows: Annotated[list[TraceRow], Field(max_length=4096)]


class WorkerAddress(Body):
    key: PublicKey


class FileAddress(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,60}$")]


class LedgerAddress(Body):
    before: Count | None = None
    """Entries before this number; without it the newest ones."""
    limit: Annotated[int, Field(ge=1, le=200)] = 50


class EvaluationPoint(Answer):
    version: int
    at_s: float
    accuracy: float
    low: float
    high: float
    problems: int


class CurvesView(Answer):
    """Metrics by column: each list has one value per version that a step made."""

    steps: list[int]
    published_s: list[float]
    metrics: dict[str, list[Value]]
    evaluations: list[EvaluationPoint]
    ages: dict[int, list[int]]
    """Consumed groups per step, by age."""
    age_steps: list[int]


class WorkersView(Answer):
    workers: list[WorkerView]


class LeaseView(Answer):
    """A lease as its contributor sees it; its slot is known to its holder alone."""

    step: int
    policy_version: int
    since_s: float
    expires_in_s: float


class SubmissionView(Answer):
    at_s: float
    step: int
    policy_version: int
    outcome: str
    words: str
    """The verdict for people."""
    tokens: int


class ContributorView(Answer):
    worker: WorkerView
    trust: str
    """What the trust state means."""
    raises: str
    """What raises it."""
    leases: list[LeaseView]
    submissions: list[SubmissionView]
    """Newest first."""
    tokens_s: list[float]
    """Times of accepted submissions, and in `tokens_total` the tokens accepted until then."""
    tokens_total: list[int]
    tokens_per_hour: float
    join_command: str


class LedgerEntryView(Answer):
    seq: int
    at_s: float
    kind: str
    body: dict[str, Any]
    hash: str


class LedgerPage(Answer):
    entries: list[LedgerEntryView]
    """Newest first."""
    total: int
    shown: int
    """Entries that the caller may read; the others are of steps that are still open."""
    head: str
    coordinator_key: str
    verified_entries: int
    """Entries whose chain and signatures this process has checked, from the first on."""
    problem: str = ""
    """What is wrong with the ledger, if anything."""


class StepAddress(Body):
    step: Count


class GroupAddress(Body):
    step: Annotated[str, Field(pattern=STEP_PATTERN)]
    """As in the name of the group: with epoch and attempt where a step was begun again."""
    slot: Count
    number: Count


class TimelineAddress(Body):
    until_s: float | None = None
    """End of the window, in seconds of the run; without it, now."""
    window_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0


class OwnerGroup(Answer):
    group_id: str
    slot: int
    number: int
    worker: str
    worker_name: str
    policy_version: int
    state: str
    batch_step: int | None
    tokens: int
    rewards: list[float]
    task_rewards: list[float]
    deferred: bool


class OwnerSubmission(Answer):
    """A file of a step, with the verdict in full."""

    submission_id: str
    step: int
    slot: int
    worker: str
    worker_name: str
    policy_version: int
    state: str
    at_s: float
    accepted: bool | None
    audited: bool
    audit_rate: float
    reasons: list[str]
    words: str
    """The verdict for people."""
    detail: str
    seconds: float
    metrics: dict[str, float | list[float]]


class OwnerStep(Answer):
    step: int
    groups: list[OwnerGroup]
    """Of the step's batch, and of its own slots."""
    submissions: list[OwnerSubmission]
    metrics: dict[str, Any]


class OwnerToken(Answer):
    text: str
    logprob: Value
    margin: Value = None
    entropy: Value = None


class OwnerTurn(Answer):
    speaker: str
    """`prompt`, `policy` or `environment`."""
    text: str
    tokens: Annotated[list[OwnerToken], Field(default_factory=list)]
    """Of the policy's turns."""


class OwnerCompletion(Answer):
    sample: int
    reward: float
    task_reward: float
    reward_from: str
    why: str
    length: int
    target_length: int
    finish_reason: str
    turns: list[OwnerTurn]


class OwnerGroupView(Answer):
    group_id: str
    task_id: str
    worker: str
    worker_name: str
    policy_version: int
    age: int
    state: str
    verdict: OwnerSubmission
    completions: list[OwnerCompletion]
    overlay: str
    """Where margins and entropies come from, or why there are none."""


class OwnerLease(Answer):
    worker: str
    step: int
    slot: int
    policy_version: int
    state: str
    issued_s: float
    ended_s: float | None
    expires_s: float
    is_late: bool
    is_backup: bool
    accepted: bool | None


class OwnerArrival(Answer):
    version: int
    published_s: float
    workers: dict[str, float]
    """First lease with it, by key."""
    relays: dict[str, float]
    """First announcement of it, by address."""


class OwnerTimeline(Answer):
    from_s: float
    until_s: float
    leases: list[OwnerLease]
    versions: list[OwnerArrival]
    names: dict[str, str]
    late: list[str]
    """Keys whose slots were late, most often late first."""


class OwnerWorker(Answer):
    worker: WorkerView
    reason: str
    audit_rate: float
    drift: float
    clean_audits: float
    anomalies: int
    missed_share: float
    work_s: float
    submissions: list[OwnerSubmission]
