"""What the trainer and the evaluator ask for and report: batches, screenings, recalls, versions, accuracies."""

from typing import Annotated, Literal

from pydantic import Field

from shoal.files import Digest
from shoal.protocol.api.fields import Answer, Body, Count, Metric, ShortText
from shoal.protocol.api.owner import RewindView


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
