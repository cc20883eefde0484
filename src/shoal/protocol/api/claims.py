"""What a validator claims, and the verdict that it returns with its evidence."""

from typing import Annotated

from pydantic import Field

from shoal.files import Digest
from shoal.protocol.api.fields import Answer, Body, ClientId, Count, SampleDigest, ShortText
from shoal.protocol.api.leases import Lease
from shoal.protocol.verdicts import Reason

MOST_CLAIMS = 16
"""Files of one claim."""


class ClaimBody(Body):
    request_id: ClientId
    wait_s: Annotated[float, Field(ge=0, le=30)] = 20
    most: Annotated[int, Field(ge=1, le=MOST_CLAIMS)] = 1
    """Files of one policy version that the validator checks together."""
    ready: Annotated[list[Digest], Field(max_length=64)] | None = None
    """Manifests of the versions that the validator can load now: it gets files of these only. Without the list, of any."""
    fetching: Annotated[list[Digest], Field(max_length=64)] = []
    """Manifests of versions that it is getting."""
    newest: Digest | None = None
    """Manifest of the newest version that it knows of."""


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
    unaudited_limits: list[Annotated[int, Field(ge=0)]] = []
    """How many groups that carry a training signal may stay without an audit, by how many there are; all, if it says nothing."""
    numerics_class: str = ""
    """Under which the worker was registered when the file arrived; empty if it was not noted."""


class WantedVersion(Answer):
    version: int
    manifest_digest: str


class ClaimAnswer(Answer):
    claim: Claim | None = None
    beside: list[Claim] = []
    """More files of the same version, claimed with it."""
    missing: list[WantedVersion] = []
    """Versions of waiting files that the validator has not and is not getting, the file that waits longest first."""
    newest: WantedVersion | None = None
    """The newest published version, reported once, so that it is fetched before its first file arrives."""
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
    drift_llrs: Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(max_length=16)] = []
    """Log-likelihood ratios of alternatives to honest numerics; the coordinator adds each up per worker."""


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
