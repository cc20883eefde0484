"""The validator role: claims submissions of one version, checks each stage by stage, audits them together, reports verdicts.

Stateless: any number of validators may run. One claims as many small submissions as it checks in a moment, so that their audits
share passes; one at a time if they are large. It claims only what it has the version of, and gets other versions meanwhile: those
of files that wait, then the newest one, as soon as it is published. A crash during a check is reported as a fault, so the worker is
never penalised for it.
"""

import logging
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.coordinator.rules.trust import groups_to_audit
from shoal.errors import IntegrityError, RefusedError, ShoalError, UnavailableError
from shoal.files import digest_bytes
from shoal.joined import JoinedRun
from shoal.metrics import EventLog, Report, silent
from shoal.policy.engine import Engine, Scored, ScoreRequest
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.page_views import AuditTrace
from shoal.protocol.rollouts import Rollout
from shoal.protocol.verdicts import Reason, is_useful, most_severe, severity
from shoal.validation.calibration.limits import Calibration, Limits
from shoal.validation.checks import Audit, Checked, audit_all, check_claims
from shoal.validation.findings import Finding, RejectedError
from shoal.validation.reward_models import RewardModelScorer
from shoal.validation.traces import trace_of
from shoal.validation.versions import HeldVersions

log = logging.getLogger(__name__)

CLAIM_WAIT_S = 20.0
SHORTEST_FETCHING_WAIT_S, LONGEST_FETCHING_WAIT_S = 0.05, 2.0
"""While a version is fetched, a claim waits as long as the fetch has taken so far: its files are claimed soon after it is there."""
TOGETHER_S = 2.0
"""Submissions that are checked together take about this long; what takes longer is checked alone."""
TRACE_S = 5.0
WARM_UP_TOKENS = 33
"""More than one chunk of states."""


@dataclass
class Check:
    """A submission on its way to a verdict."""

    claim: api.Claim
    verdict: api.VerdictBody | None = None
    checked: Checked | None = None
    groups: Sequence[int] = ()
    """That are to be audited."""
    make_trace: Callable[[], AuditTrace] | None = None

    @property
    def trace(self) -> AuditTrace | None:
        """Made now: batches wait for verdicts, nobody for a trace, and it decides about none."""
        try:
            return self.make_trace() if self.make_trace is not None else None
        except Exception:
            log.exception("the audit of %s left no trace", self.claim.submission_id)
            return None

    @property
    def replay_s(self) -> float:
        return self.checked.replay_s if self.checked is not None else 0.0


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
        self.versions = HeldVersions(run.weights, report)
        self._loaded, self._is_warm = "", False
        self._seconds_each = TOGETHER_S
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        """Checks submissions until the run is finished and none is left; outlives a coordinator that is away."""
        while not self._stopping.is_set():
            self._warm_up()
            fetching = self.versions.fetching()
            body = api.ClaimBody(
                request_id=secrets.token_hex(16),
                wait_s=self._claim_wait_s() if fetching else CLAIM_WAIT_S,
                most=self.most_together(),
                ready=self.versions.ready(),
                fetching=fetching,
                newest=self.versions.newest,
            )
            answer = self.client.claim(body)
            self.versions.want(answer.missing)
            self.versions.expect(answer.newest)
            if answer.claim is not None:
                self._handle([answer.claim, *answer.beside])
            elif answer.run_state == "finished" and not answer.missing and not self.versions.wanted():
                return

    def _warm_up(self) -> None:
        """Loads the first version that is here and scores a made-up answer: the first pass of an engine takes many times as long
        as the next one, and a batch would wait for it."""
        version = self.versions.newest_ready() if not self._is_warm else None
        if version is None:
            return
        self._is_warm = True
        item = self.joined.workload.items(secrets.token_bytes(32))[0]
        length = min(WARM_UP_TOKENS, self.joined.descriptor.rollouts.max_new_tokens)
        request = ScoreRequest(item.prompt_tokens, item.prompt_tokens[:1] * length, item.seed)
        try:
            self._load(version.version, version.manifest_digest)
            self.engine.score([request] * 2, temperature=self.joined.descriptor.rollouts.temperature)
        except Exception:  # if something is wrong, the audit of a file says it
            log.debug("the engine could not be warmed up with version %d", version.version, exc_info=True)

    def _claim_wait_s(self) -> float:
        return min(max(SHORTEST_FETCHING_WAIT_S, self.versions.fetching_s()), LONGEST_FETCHING_WAIT_S)

    def most_together(self) -> int:
        """How many submissions it claims at once."""
        return min(api.MOST_CLAIMS, max(1, int(TOGETHER_S / self._seconds_each)))

    def took(self, seconds_each: float) -> None:
        """Takes note of what a submission cost."""
        self._seconds_each = max(1e-3, (self._seconds_each + seconds_each) / 2)

    def _handle(self, claims: Sequence[api.Claim]) -> None:
        started = time.monotonic()
        checks = self.check_all(claims)
        seconds = (time.monotonic() - started) / len(checks)
        self.took(seconds)
        for check in checks:
            assert check.verdict is not None
            self._report_verdict(check, check.verdict.model_copy(update={"seconds": seconds}))
        for check in checks:
            self._send_trace(check.trace)

    def _report_verdict(self, check: Check, verdict: api.VerdictBody) -> None:
        claim = check.claim
        self.client.verdict(verdict)
        replayed = {"replay_s": round(check.replay_s, 4)} if self.joined.descriptor.environments else {}
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
        """The verdict on one submission."""
        (check,) = self.check_all([claim])
        assert check.verdict is not None
        return check.verdict

    def check_all(self, claims: Sequence[api.Claim]) -> list[Check]:
        """Submissions of one version with their verdicts. Only what is not our fault is held against a worker."""
        checks = [self._checked(claim) for claim in claims]
        audited = [check for check in checks if check.verdict is None]
        for check, verdict in zip(audited, self._audited(audited), strict=True):
            check.verdict = verdict
        return checks

    def _checked(self, claim: api.Claim) -> Check:
        """Everything but the audit; without a verdict if there is one to come."""
        check = Check(claim)

        def decide() -> api.VerdictBody | None:
            data = self._file(claim)
            check.checked = check_claims(data, claim, self.joined.workload, self.engine.vocab_size)
            if self.reward_models:
                check.checked = self.reward_models.amend(check.checked)
            useful = {group.group for group in group_verdicts(check.checked) if group.useful}
            check.groups = groups_to_audit(claim.audit_groups, claim.audit_order, useful, claim.unaudited_limits)
            return None if check.groups else accepted(claim, check.checked, self._flips_allowed(check.checked))

        check.verdict = _or_fault(claim, decide)
        return check

    def _file(self, claim: api.Claim) -> bytes:
        try:
            return self.client.submission_file(claim.submission_id, claim.digest)
        except (IntegrityError, RefusedError) as error:
            raise RejectedError(Reason.FILE_GONE, str(error)) from None

    def _audited(self, checks: Sequence[Check]) -> Iterator[api.VerdictBody]:
        """The verdicts of audits that share their passes. If one breaks them, each is audited alone: the others did nothing."""
        found: list[api.VerdictBody] | None = None
        if len(checks) > 1:
            try:
                found = self._audit(checks)
            except UnavailableError as error:  # of the version that all need: asking for each would wait for each
                found = [rejected(check.claim, [Finding(Reason.VERSION_GONE, str(error))]) for check in checks]
            except Exception:  # whichever file it was, its own audit will say so
                log.exception("an audit of %d files together failed", len(checks))
        for number, check in enumerate(checks):
            verdict = found[number] if found else _or_fault(check.claim, lambda check=check: self._audit([check])[0])  # type: ignore[misc]
            assert verdict is not None
            yield verdict

    def _audit(self, checks: Sequence[Check]) -> list[api.VerdictBody]:
        known = [check for check in checks if self._limits(check) is not None]
        outcomes = iter(self._scored(known) if known else [])
        verdicts = []
        for check in checks:
            assert check.checked is not None
            if self._limits(check) is None:
                finding = Finding(Reason.NUMERICS_UNKNOWN, check.checked.header.numerics_class)
                verdicts.append(rejected(check.claim, [finding]))
                continue
            findings, metrics = next(outcomes)
            verdict = (
                rejected(check.claim, findings)
                if findings
                else accepted(check.claim, check.checked, self._flips_allowed(check.checked))
            )
            verdicts.append(verdict.model_copy(update={"audited_groups": list(check.groups), "metrics": metrics}))
        return verdicts

    def _scored(self, checks: Sequence[Check]) -> list[tuple[list[Finding], api.AuditMetrics]]:
        lease = checks[0].claim.lease
        self._load(lease.policy_version, lease.manifest_digest)
        temperature = self.joined.descriptor.rollouts.temperature

        def audits() -> Iterable[Audit]:
            for check in checks:
                limits = self._limits(check)
                assert check.checked is not None
                assert limits is not None
                yield Audit(check.checked, check.groups, limits)

        def keep_trace(number: int, rollouts: list[Rollout], scored: list[Scored]) -> None:
            submission_id = checks[number].claim.submission_id
            checks[number].make_trace = lambda: trace_of(submission_id, rollouts, scored, self.engine, temperature)

        return audit_all(list(audits()), self.engine, temperature, keep_trace)

    def _limits(self, check: Check) -> Limits | None:
        assert check.checked is not None
        return self.calibration.limits(check.checked.header.numerics_class)

    def _send_trace(self, trace: AuditTrace | None) -> None:
        """For the owner's page."""
        if trace is None:
            return
        try:
            self.client.send_trace(trace, deadline_s=TRACE_S)
        except ShoalError as error:
            self.metrics.event("trace_lost", reason=error.message)

    def _flips_allowed(self, checked: Checked) -> int:
        limits = self.calibration.limits(checked.header.numerics_class)
        return limits.flips_between(checked.tokens) if limits else 0

    def _load(self, version: int, manifest_digest: str) -> None:
        if self._loaded == manifest_digest:
            return
        self._loaded = ""
        self.engine.load(self.versions.path(version, manifest_digest))
        self._loaded = manifest_digest


def _or_fault(claim: api.Claim, decide: Callable[[], api.VerdictBody | None]) -> api.VerdictBody | None:
    """What `decide` returns, or the verdict that its failure is."""
    try:
        return decide()
    except RejectedError as error:
        return rejected(claim, [error.finding])
    except UnavailableError as error:
        return rejected(claim, [Finding(Reason.VERSION_GONE, str(error))])
    except Exception as error:  # a validator must survive any file; the submission is retried elsewhere
        log.exception("the check of %s failed", claim.submission_id)
        return rejected(claim, [Finding(Reason.VALIDATOR_CRASH, f"{type(error).__name__}: {error}")])


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
