"""Repeats a verdict without the run: a third party needs the file, the policy that it names, the descriptor and the step's secret.

The descriptor is signed by the run key; the secret of a step is recorded in the ledger once its batch is formed. The checks are the
validator's own. The lease is rebuilt from the file's header, so a header that contradicts the true lease is not seen here: the
ledger's entry names worker, step, slot and file. An exported ledger brings the secret, the verdict and the audit draw.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.coordinator.ledger import Entry, check_secrets
from shoal.errors import ConfigError
from shoal.files import digest_bytes
from shoal.policy.directory import resolve_model
from shoal.policy.engines import Numerics, policy_engine
from shoal.protocol import api
from shoal.protocol.assignment import slot_seed
from shoal.protocol.descriptor import RunDescriptor, open_descriptor
from shoal.protocol.rollouts import RolloutFileError, RolloutHeader, RolloutLimits, read_rollouts
from shoal.protocol.steps import SECRET_BYTES, step_of
from shoal.protocol.verdicts import Reason
from shoal.tasks import TaskSet, TaskSets, TextCodec, load_tasks
from shoal.tasks.environments.registry import check_environments
from shoal.tasks.workload import Workload
from shoal.validation.calibration.limits import load_calibration
from shoal.validation.checks import audit, check_claims
from shoal.validation.findings import Finding, RejectedError


@dataclass(frozen=True)
class OfflineVerdict:
    digest: str
    """Of the file: the one that the worker signed and the ledger names."""
    header: RolloutHeader | None
    findings: list[Finding]
    metrics: api.AuditMetrics

    @property
    def accepted(self) -> bool:
        return not self.findings


@dataclass(frozen=True)
class Recorded:
    """What an exported ledger says of a file."""

    step_secret: bytes
    accepted: bool
    audit_drawn: list[int]
    """Numbers of the groups."""
    audit_rate: float

    def __str__(self) -> str:
        groups = ", ".join(map(str, self.audit_drawn))
        audit = f"groups {groups} drawn for an audit" if groups else "no group drawn for an audit"
        return f"the ledger says {'accepted' if self.accepted else 'rejected'}, {audit} at rate {self.audit_rate:g}"


def recorded(entries: Sequence[Entry], digest: str) -> Recorded:
    """The ledger's verdict on a file, its audit draw repeated, and the secret of the file's step."""
    check_secrets(entries)
    bodies = [(entry.kind, json.loads(entry.body)) for entry in entries if entry.kind in ("verdict", "recorded")]
    verdict = next((body for kind, body in bodies if kind == "verdict" and body["file"] == digest), None)
    if verdict is None:
        raise ConfigError(f"The ledger has no verdict on a file {digest[:12]}….", hint="Is it the ledger of this run?")
    for kind, body in bodies:
        if kind == "recorded" and step_of(body) == step_of(verdict):
            secret = bytes.fromhex(body["step_secret"])
            return Recorded(secret, verdict["accepted"], verdict["audit_drawn"], verdict["audit_rate"])
    raise ConfigError(
        f"The ledger does not hold the secret of step {verdict['step']} yet.",
        hint="It is published when the step's batch is formed: export the ledger again later.",
    )


def verify_file(
    data: bytes,
    policy: Path,
    descriptor: bytes,
    step_secret: bytes,
    *,
    calibration: str = "bundled",
    tasks: Path | None = None,
    task_sets: TaskSets | None = None,
) -> OfflineVerdict:
    """The verdict of a full audit of these bytes with the policy in this directory."""
    if len(step_secret) != SECRET_BYTES:
        raise ConfigError(
            f"A step's secret has {SECRET_BYTES} bytes.", hint="It is in the ledger's entry about the step's batch."
        )
    run = open_descriptor(descriptor)
    check_environments(run.environments)
    workload = Workload(run, TextCodec.from_directory(resolve_model(str(policy))), task_sets or _tasks(run, tasks))
    digest = digest_bytes(data)
    try:
        header, _ = read_rollouts(data, workload.limits)
    except RolloutFileError as error:
        return OfflineVerdict(digest, None, [Finding(Reason.SCHEMA, error.message)], api.AuditMetrics())
    engine = policy_engine("torch", policy, workload.codec.eos_token_ids, numerics=Numerics("cpu"))
    try:
        checked = check_claims(data, _claim(header, digest, step_secret), workload, engine.vocab_size)
    except RejectedError as rejected:
        return OfflineVerdict(digest, header, [rejected.finding], api.AuditMetrics())
    limits = load_calibration(calibration).limits(header.numerics_class)
    if limits is None:
        finding = Finding(Reason.NUMERICS_UNKNOWN, header.numerics_class)
        return OfflineVerdict(digest, header, [finding], api.AuditMetrics())
    findings, metrics = audit(checked, engine, limits, run.rollouts.temperature, checked.rows_by_group())
    return OfflineVerdict(digest, header, findings, metrics)


def _tasks(run: RunDescriptor, path: Path | None) -> TaskSets:
    """From a file of tasks that a worker has in its cache, or from the source that the descriptor names."""
    if path is not None:
        return TaskSets(train=TaskSet.open(path), heldout=TaskSet())
    if run.task_files:
        raise ConfigError(
            "The owner of the run serves its tasks.", hint="Give the file that a worker keeps in its cache."
        )
    return load_tasks(run.tasks)


def claim_of(data: bytes, digest: str, step_secret: bytes, limits: RolloutLimits) -> api.Claim:
    """The claim that a file makes by its header, with the lease that follows from it."""
    return _claim(read_rollouts(data, limits)[0], digest, step_secret)


def _claim(header: RolloutHeader, digest: str, step_secret: bytes) -> api.Claim:
    lease = api.Lease(
        lease_id=header.lease_id,
        epoch=header.epoch,
        step=header.step,
        attempt=header.attempt,
        slot=header.slot,
        slot_seed=slot_seed(step_secret, header.slot).hex(),
        policy_version=header.policy_version,
        manifest_digest=header.manifest_digest,
        expires_at=0.0,
    )
    return api.Claim(
        claim_id="offline-verdict",
        submission_id="offline-verdict",
        worker_key=header.worker_key,
        digest=digest,
        lease=lease,
        audit_groups=[],
    )


def verdict_lines(verdict: OfflineVerdict) -> list[str]:
    """The verdict as a person reads it."""
    lines = [f"file {verdict.digest}"]
    if verdict.header is not None:
        header = verdict.header
        lines.append(
            f"step {header.step} slot {header.slot}, version {header.policy_version} by {header.worker_key[:12]}…, "
            f"numerics {header.numerics_class}"
        )
    lines += [f"{finding.reason}: {finding.detail}" for finding in verdict.findings]
    if verdict.metrics.tokens:
        lines.append(", ".join(f"{name} {_shown(value)}" for name, value in verdict.metrics.model_dump().items()))
    return [*lines, "accepted" if verdict.accepted else "rejected"]


def _shown(value: float | list[float]) -> str:
    return " / ".join(f"{one:g}" for one in value) if isinstance(value, list) else f"{value:g}"
