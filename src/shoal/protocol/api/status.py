"""What everybody may read of a run: its state now, and its history."""

from typing import Literal

from pydantic import ConfigDict

from shoal.protocol.api.fields import Answer, Metric
from shoal.protocol.api.owner import RewindView
from shoal.protocol.api.relays import RelayView
from shoal.protocol.api.training import EvaluationBody
from shoal.protocol.api.workers import WorkerView


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
    """Of generated groups, in the measured ones."""


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
