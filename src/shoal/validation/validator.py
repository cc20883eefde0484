"""The validator role: claims a submission, checks it stage by stage, reports a verdict.

Stateless: any number of validators may run, each claims one submission at a time. A crash during a check is reported as a
fault, so the worker is never penalised for it. Versions of the asynchrony window stay on disk; the engine swaps between them.
"""

import logging
import secrets
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.coordinator.rules.trust import groups_to_audit
from shoal.errors import IntegrityError, RefusedError, ShoalError, UnavailableError
from shoal.files import digest_bytes
from shoal.joined import JoinedRun
from shoal.metrics import EventLog, Report, silent
from shoal.policy.engine import Engine, Scored
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.page_views import AuditTrace
from shoal.protocol.rollouts import Rollout
from shoal.protocol.verdicts import Reason, is_useful, most_severe, severity
from shoal.validation.calibration.limits import Calibration
from shoal.validation.checks import Checked, audit, check_claims
from shoal.validation.findings import Finding, RejectedError
from shoal.validation.reward_models import RewardModelScorer
from shoal.validation.traces import trace_of

log = logging.getLogger(__name__)

CLAIM_WAIT_S = 20.0
FETCH_VERSION_S = 60.0
TRACE_S = 5.0


class Validator:
    def __init__(
        self,
        run: JoinedRun,
        client: CoordinatorClient,
        engine: Engine,
        calibration: Calibration,
        *,
        reward_models: RewardModelScorer | None = None,
        metrics: EventLog | None = None,
        report: Report = silent,
    ) -> None:
        self.joined, self.client, self.engine, self.calibration = run, client, engine, calibration
        self.reward_models = reward_models
        self.metrics = metrics or EventLog()
        self.report = report
        self._loaded = ""
        self._trace: AuditTrace | None = None
        self._replay_s = 0.0
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        """Checks submissions until the run is finished and none is left; outlives a coordinator that is away."""
        while not self._stopping.is_set():
            body = api.ClaimBody(request_id=secrets.token_hex(16), wait_s=CLAIM_WAIT_S)
            answer = self.client.claim(body)
            if answer.claim is not None:
                self._handle(answer.claim)
            elif answer.run_state == "finished":
                return

    def _handle(self, claim: api.Claim) -> None:
        started = time.monotonic()
        verdict = self.check(claim).model_copy(update={"seconds": time.monotonic() - started})
        self.client.verdict(verdict)
        self._send_trace()
        replayed = {"replay_s": round(self._replay_s, 4)} if self.joined.descriptor.environments else {}
        self.metrics.event(
            "verdict",
            worker=claim.worker_key,
            step=claim.lease.step,
            slot=claim.lease.slot,
            accepted=verdict.accepted,
            audited_groups=len(verdict.audited_groups),
            reasons=list(verdict.reasons),
            seconds=round(verdict.seconds, 3),
            **verdict.metrics.model_dump(),
            **replayed,
        )
        if not verdict.accepted:
            self.report(f"{claim.worker_key[:12]}… step {claim.lease.step} slot {claim.lease.slot}: {verdict.detail}")

    def check(self, claim: api.Claim) -> api.VerdictBody:
        """The verdict on one submission. Only what is not our fault is held against the worker."""
        try:
            data = self.client.submission_file(claim.submission_id, claim.digest)
        except (IntegrityError, RefusedError) as error:
            return rejected(claim, [Finding(Reason.FILE_GONE, str(error))])
        try:
            checked = check_claims(data, claim, self.joined.workload, self.engine.vocab_size)
            self._replay_s = checked.replay_s
            checked = self.reward_models.amend(checked) if self.reward_models else checked
            useful = {group.group for group in group_verdicts(checked) if group.useful}
            groups = groups_to_audit(claim.audit_groups, claim.audit_order, useful, claim.unaudited_limit)
            return (
                self._audit(claim, checked, groups)
                if groups
                else accepted(claim, checked, self._flips_allowed(checked))
            )
        except RejectedError as error:
            return rejected(claim, [error.finding])
        except UnavailableError as error:
            return rejected(claim, [Finding(Reason.VERSION_GONE, str(error))])
        except Exception as error:  # a validator must survive any file; the submission is retried elsewhere
            log.exception("the check of %s failed", claim.submission_id)
            return rejected(claim, [Finding(Reason.VALIDATOR_CRASH, f"{type(error).__name__}: {error}")])

    def _audit(self, claim: api.Claim, checked: Checked, groups: list[int]) -> api.VerdictBody:
        limits = self.calibration.limits(checked.header.numerics_class)
        if limits is None:
            return rejected(claim, [Finding(Reason.NUMERICS_UNKNOWN, checked.header.numerics_class)])
        self._load(claim.lease)
        temperature = self.joined.descriptor.rollouts.temperature

        def keep_trace(rollouts: list[Rollout], scored: list[Scored]) -> None:
            try:
                self._trace = trace_of(claim.submission_id, rollouts, scored, self.engine, temperature)
            except Exception:  # what the page shows must not decide about a verdict
                log.exception("the audit of %s left no trace", claim.submission_id)

        findings, metrics = audit(checked, self.engine, limits, temperature, groups, keep_trace)
        verdict = rejected(claim, findings) if findings else accepted(claim, checked, self._flips_allowed(checked))
        return verdict.model_copy(update={"audited_groups": groups, "metrics": metrics})

    def _send_trace(self) -> None:
        """For the owner's page; the verdict is recorded, and nothing waits for this."""
        trace, self._trace = self._trace, None
        if trace is None:
            return
        try:
            self.client.send_trace(trace, deadline_s=TRACE_S)
        except ShoalError as error:
            self.metrics.event("trace_lost", reason=error.message)

    def _flips_allowed(self, checked: Checked) -> int:
        limits = self.calibration.limits(checked.header.numerics_class)
        return limits.flips_between(checked.tokens) if limits else 0

    def _load(self, lease: api.Lease) -> None:
        if self._loaded == lease.manifest_digest:
            return
        self._loaded = ""
        self.engine.load(self._version_path(lease))
        self._loaded = lease.manifest_digest

    def _version_path(self, lease: api.Lease) -> Path:
        try:
            return self.joined.weights.fetch_version(
                lease.policy_version, lease.manifest_digest, deadline_s=FETCH_VERSION_S
            )
        except ShoalError as error:
            raise UnavailableError(f"Version {lease.policy_version} cannot be had: {error}") from error


def accepted(claim: api.Claim, checked: Checked, flips_allowed: int) -> api.VerdictBody:
    return _verdict(claim, accepted=True, groups=group_verdicts(checked), flips_allowed=flips_allowed)


def rejected(claim: api.Claim, findings: Sequence[Finding]) -> api.VerdictBody:
    """The detail is that of the most severe findings."""
    reasons = [finding.reason for finding in findings]
    worst = most_severe(reasons)
    detail = "; ".join(finding.detail for finding in findings if severity(finding.reason) is worst)
    return _verdict(claim, accepted=False, reasons=reasons, detail=detail[:2000])


def _verdict(claim: api.Claim, **verdict: Any) -> api.VerdictBody:
    return api.VerdictBody(claim_id=claim.claim_id, submission_id=claim.submission_id, **{"reasons": [], **verdict})


def group_verdicts(checked: Checked) -> list[api.GroupVerdict]:
    """The validator's own rewards, group by group."""
    return [
        api.GroupVerdict(
            group=group,
            task_id=checked.items[numbers[0]].task.problem_id,
            useful=all(checked.rewards[number].scored for number in numbers)
            and is_useful(checked.rewards[number].task_reward for number in numbers),
            tokens=sum(checked.rollouts[number].sampled_count for number in numbers),
            rewards=[checked.rewards[number].total for number in numbers],
            task_rewards=[checked.rewards[number].task_reward for number in numbers],
            samples=[sample_digest(checked.rollouts[number].output_tokens) for number in numbers],
        )
        for group, numbers in checked.rows_by_group().items()
    ]


def sample_digest(tokens: Sequence[int]) -> str:
    """What identifies the tokens of a sample among the files of its slot."""
    return digest_bytes(struct.pack(f"<{len(tokens)}q", *tokens))[: api.SAMPLE_DIGEST_CHARS]
