"""The checks of a submission: pure, from cheap to expensive, each naming the first claim that does not hold.

`check_claims` runs on every submission: schema → header → assignment → bounds → replays of episodes → rewards. `audit` runs on
the groups that the audit draw names and needs the policy: one prefill gives the sampling check, the commitments and the
log-probabilities.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from shoal.policy.engine import Engine, Scored, ScoreRequest
from shoal.proofs.commitments import ChunkDifference, ProofError, compare_chunks, split_chunks
from shoal.protocol import api
from shoal.protocol.rollouts import Rollout, RolloutFileError, RolloutHeader, read_rollouts
from shoal.protocol.verdicts import Reason
from shoal.tasks.workload import Reward, WorkItem, Workload
from shoal.validation import flips, ranks
from shoal.validation.calibration.limits import Limits
from shoal.validation.findings import Finding, RejectedError
from shoal.validation.replays import replay_rows

TOLERATED_SHARE = 0.1
"""Share of rows whose tolerant verifier may score otherwise here than at the worker: the validator's reward counts anyway."""
SCORING_SLACK = 3.0
"""A validator may spend this many times the worker's budget on scoring, so that a slower machine comes to the same end."""
LOGPROB_ROUNDING = 1e-4
"""Engines that subtract a sum of exponentials round a log-probability near zero to slightly above it."""


Outcome = tuple[Finding | None, api.AuditMetrics]
"""What one check of an audit found, with the metrics that it measured."""


@dataclass(frozen=True)
class Checked:
    """A submission whose claims hold so far."""

    header: RolloutHeader
    rollouts: list[Rollout]
    items: list[WorkItem]
    rewards: list[Reward]
    replay_s: float = 0.0
    """Processor seconds of the environments that were replayed."""

    @property
    def tokens(self) -> int:
        """Sampled ones."""
        return sum(rollout.sampled_count for rollout in self.rollouts)

    def rows_by_group(self) -> dict[int, list[int]]:
        """Numbers of the rows of each group."""
        rows: dict[int, list[int]] = {}
        for number, item in enumerate(self.items):
            rows.setdefault(item.group, []).append(number)
        return rows


def check_claims(data: bytes, claim: api.Claim, workload: Workload, vocab_size: int) -> Checked:
    """Everything that can be checked without the policy; raises RejectedError at the first thing that does not hold."""
    try:
        header, rollouts = read_rollouts(data, workload.limits)
    except RolloutFileError as error:
        raise RejectedError(Reason.SCHEMA, error.message) from None
    _check_header(header, claim, workload)
    items = workload.items(bytes.fromhex(claim.lease.slot_seed))
    _check_assignment(rollouts, items)
    for number, rollout in enumerate(rollouts):
        _check_bounds(number, rollout, items[number], workload, vocab_size)
    replayed = replay_rows(rollouts, items, workload, TOLERATED_SHARE)
    rewards = replayed.rewards | _check_rewards(rollouts, items, workload)
    return Checked(header, rollouts, items, [rewards[row] for row in range(len(items))], replayed.seconds)


def _check_header(header: RolloutHeader, claim: api.Claim, workload: Workload) -> None:
    lease = claim.lease
    expected = {
        "run_id": workload.descriptor.run_id,
        "epoch": lease.epoch,
        "step": lease.step,
        "attempt": lease.attempt,
        "slot": lease.slot,
        "lease_id": lease.lease_id,
        "worker_key": claim.worker_key,
        "policy_version": lease.policy_version,
        "manifest_digest": lease.manifest_digest,
    }
    for name, value in expected.items():
        if getattr(header, name) != value:
            raise RejectedError(Reason.HEADER, f"{name} is {getattr(header, name)!r}, the lease says {value!r}")
    if header.numerics_class != (claim.numerics_class or header.numerics_class):
        raise RejectedError(
            Reason.HEADER, f"numerics class {header.numerics_class!r}, its key registered {claim.numerics_class!r}"
        )
    if header.numerics_class not in workload.descriptor.numerics_classes:
        # The coordinator admitted it: this validator reads an older descriptor. Without that, the worker made it up.
        reason = Reason.NUMERICS_UNKNOWN if claim.numerics_class else Reason.HEADER
        raise RejectedError(reason, f"numerics class {header.numerics_class!r} is not in the run's descriptor")


def _check_assignment(rollouts: Sequence[Rollout], items: Sequence[WorkItem]) -> None:
    if len(rollouts) != len(items):
        raise RejectedError(Reason.ASSIGNMENT, f"{len(rollouts)} rows, the slot asks for {len(items)}")
    for number, (rollout, item) in enumerate(zip(rollouts, items, strict=True)):
        claimed = (rollout.group, rollout.sample, rollout.task_id, rollout.target_length)
        if claimed != (item.group, item.sample, item.task.problem_id, item.target_length):
            raise RejectedError(Reason.ASSIGNMENT, f"row {number} answers another task, sample or target")
        if tuple(rollout.input_tokens) != item.prompt_tokens:
            raise RejectedError(Reason.ASSIGNMENT, f"row {number} has another prompt")


def _check_bounds(number: int, rollout: Rollout, item: WorkItem, workload: Workload, vocab_size: int) -> None:
    tokens, sampled = rollout.output_tokens, rollout.sampled_count
    limit = workload.descriptor.rollouts.max_new_tokens
    if len(tokens) > limit or len(rollout.output_logprobs) != sampled:
        raise RejectedError(
            Reason.BOUNDS,
            f"row {number} has {len(tokens)} tokens, {sampled} of them sampled, and {len(rollout.output_logprobs)} "
            "log-probabilities",
        )
    if len(rollout.segment_lengths) > workload.most_segments(item.environment):
        raise RejectedError(Reason.BOUNDS, f"row {number} has {len(rollout.segment_lengths)} segments")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise RejectedError(Reason.BOUNDS, f"row {number} has a token outside the vocabulary of {vocab_size}")
    # They are fp32 in the file, so their sum is finite exactly if each is.
    if not math.isfinite(sum(rollout.output_logprobs)) or max(rollout.output_logprobs) > LOGPROB_ROUNDING:
        raise RejectedError(Reason.BOUNDS, f"row {number} has a log-probability that is not one")
    if not all(map(math.isfinite, (rollout.task_reward, rollout.length_penalty, rollout.reward))):
        raise RejectedError(Reason.BOUNDS, f"row {number} has a reward that is not finite")
    if not item.environment:
        _check_termination(number, rollout, workload.codec.eos_token_ids, limit)
    if len(rollout.proofs) != workload.chunk_count(sampled):
        raise RejectedError(Reason.PROOF_FORMAT, f"row {number} has {len(rollout.proofs)} proofs for {sampled} tokens")


def _check_termination(number: int, rollout: Rollout, eos_token_ids: Sequence[int], limit: int) -> None:
    """Ends with the only end token, or at the limit. Whether the end token truly won is the sampling check's matter."""
    tokens, ended = rollout.output_tokens, rollout.output_tokens[-1] in eos_token_ids
    if sum(map(tokens.count, eos_token_ids)) > ended:
        raise RejectedError(Reason.TERMINATION, f"row {number} goes on after an end token")
    if not ended and len(tokens) < limit:
        raise RejectedError(Reason.TERMINATION, f"row {number} stops after {len(tokens)} tokens without an end token")
    if rollout.finish_reason != ("stop" if ended else "length"):
        raise RejectedError(Reason.TERMINATION, f"row {number} gives the wrong finish reason")


def _check_rewards(rollouts: Sequence[Rollout], items: Sequence[WorkItem], workload: Workload) -> dict[int, Reward]:
    """The validator's own rewards of rows that a verifier scores, cheap ones first. A false claim counts only where an honest
    one could not differ."""
    rewards: dict[int, Reward] = {}
    scored = [number for number, item in enumerate(items) if not item.environment]
    tasks = {items[row].task.task_type: items[row].task for row in scored}
    costly_types = {name for name, task in tasks.items() if workload.is_costly(task)}
    for costly in (False, True):
        rows = [row for row in scored if (items[row].task.task_type in costly_types) is costly]
        outputs = [(items[row].task, items[row].target_length, rollouts[row].output_tokens) for row in rows]
        rewards |= zip(rows, workload.rewards(outputs, slack=SCORING_SLACK), strict=True)
        proofs = [row for row in rows if rewards[row].exact and not rewards[row].agrees_with(rollouts[row])]
        if proofs:
            raise RejectedError(Reason.REWARD, _false_claim(proofs[0], rollouts, rewards))
    doubtful = [row for row in scored if _is_doubtful(rollouts[row], rewards[row])]
    if len(doubtful) > max(1, TOLERATED_SHARE * len(rollouts)):
        detail = f"{_false_claim(doubtful[0], rollouts, rewards)}, and {len(doubtful) - 1} more rows are off"
        raise RejectedError(Reason.REWARD_TOLERANT, detail)
    return rewards


def _is_doubtful(rollout: Rollout, reward: Reward) -> bool:
    """A slower worker may claim less than is found here, and a limit of time may be met here only. But what three times the
    worker's budget did not pay for cannot have been scored by the worker."""
    claims_less = rollout.task_reward <= reward.task_reward and rollout.reward <= reward.total
    return not claims_less and not reward.limited and not reward.agrees_with(rollout)


def _false_claim(number: int, rollouts: Sequence[Rollout], rewards: Mapping[int, Reward]) -> str:
    reward = rewards[number]
    return f"row {number} claims reward {rollouts[number].reward:g}, it is worth {reward.total:g} ({reward.why})"


@dataclass(frozen=True)
class Audit:
    """Some groups of a submission, to be recomputed with the policy."""

    checked: Checked
    groups: Collection[int]
    limits: Limits

    @property
    def rows(self) -> list[tuple[Rollout, WorkItem]]:
        pairs = zip(self.checked.rollouts, self.checked.items, strict=True)
        return [pair for pair in pairs if pair[1].group in self.groups]


OnScored = Callable[[int, list[Rollout], list[Scored]], None]
"""Takes the number of the audit, and its rows with their scores."""


def audit_all(
    audits: Sequence[Audit], engine: Engine, temperature: float, on_scored: OnScored | None = None
) -> list[tuple[list[Finding], api.AuditMetrics]]:
    """Recomputes groups of several submissions with the policy that `engine` holds, in common passes; of each submission every
    finding, and the metrics behind it."""
    rows = [audit.rows for audit in audits]
    requests = [
        ScoreRequest(item.prompt_tokens, tuple(rollout.output_tokens), item.seed, tuple(rollout.segment_lengths))
        for own in rows
        for rollout, item in own
    ]
    scored = iter(engine.score(requests, temperature=temperature))
    outcomes = []
    for number, (audit, own) in enumerate(zip(audits, rows, strict=True)):
        rollouts, scores = [rollout for rollout, _ in own], list(islice(scored, len(own)))
        if on_scored is not None:
            on_scored(number, rollouts, scores)
        proofs = [proof for rollout in rollouts for proof in rollout.proofs]
        outcomes.append(compare([rollout.output_logprobs for rollout in rollouts], proofs, scores, audit.limits))
    return outcomes


def audit(
    checked: Checked, engine: Engine, limits: Limits, temperature: float, groups: Collection[int]
) -> tuple[list[Finding], api.AuditMetrics]:
    """One submission alone."""
    (outcome,) = audit_all([Audit(checked, groups, limits)], engine, temperature)
    return outcome


def compare(
    logprobs: Sequence[Sequence[float]], proofs: Sequence[bytes], scored: Sequence[Scored], limits: Limits
) -> tuple[list[Finding], api.AuditMetrics]:
    """The claims of a worker about each completion, against the policy's own scores of the same tokens."""
    findings: list[Finding] = []
    metrics: dict[str, Any] = {}
    llrs: list[float] = []
    for finding, measured in (
        check_sampling(scored, limits),
        check_logprobs(logprobs, scored, limits),
        check_commitments(proofs, scored, limits),
    ):
        findings += [finding] if finding else []
        metrics |= measured.model_dump(exclude_unset=True)
        llrs += measured.drift_llrs
    return findings, api.AuditMetrics(**metrics | {"drift_llrs": llrs})


def check_sampling(scored: Sequence[Scored], limits: Limits) -> Outcome:
    margins = torch.cat([row.margins for row in scored]).double()
    flipped = margins > limits.margin_noise
    tokens, worst, margin_sum = margins.numel(), float(margins.max()), float(margins[flipped].sum())
    metrics = api.AuditMetrics(
        tokens=tokens,
        margin_max=worst,
        margin_sum=margin_sum,
        rounding_flips=int(flipped.sum()),
        drift_llrs=flips.evidence(scored, limits.flip_scale),
    )
    if worst > limits.margin_max:
        count = int((margins > limits.margin_max).sum())
        detail = f"{count} of {tokens} tokens are not those that the seed selects, worst margin {worst:.3g}"
        return Finding(Reason.SAMPLING, detail), metrics
    allowed = limits.flips_allowed(tokens)
    if metrics.rounding_flips > allowed:
        detail = f"{metrics.rounding_flips} rounding flips in {tokens} tokens, {allowed} are honest"
        return Finding(Reason.SAMPLING_DRIFT, detail), metrics
    return None, metrics


def check_logprobs(logprobs: Sequence[Sequence[float]], scored: Sequence[Scored], limits: Limits) -> Outcome:
    claimed = torch.tensor([value for row in logprobs for value in row])
    error = float((claimed - torch.cat([row.logprobs for row in scored]).cpu()).abs().max())
    metrics = api.AuditMetrics(logprob_error_max=error)
    if error <= limits.logprob_error:
        return None, metrics
    detail = f"a log-probability is off by {error:.3g}, {limits.logprob_error:g} is honest"
    return Finding(Reason.LOGPROBS, detail), metrics


def check_commitments(proofs: Sequence[bytes], scored: Sequence[Scored], limits: Limits) -> Outcome:
    chunks = [chunk for row in scored for chunk in split_chunks(row.states)]
    try:
        differences = compare_chunks(proofs, chunks)
    except ProofError as error:
        if not error.code.startswith("proof_"):
            raise  # about the validator's own states, so not the worker's fault
        return Finding(Reason.PROOF_FORMAT, error.message), api.AuditMetrics(drift_llrs=[0.0])
    distances, sizes = [ranks.distance(difference) for difference in differences], [len(chunk) for chunk in chunks]
    metrics = api.AuditMetrics(
        exponent_mismatches_max=max(difference.exponent_mismatches for difference in differences),
        mantissa_mean_max=max(difference.mantissa_mean for difference in differences),
        drift_llrs=[ranks.evidence(distances, sizes, limits.commitment_ladders)],
    )
    forged = sum(difference.degenerate for difference in differences)
    if forged:
        detail = f"{forged} of {len(differences)} commitments are degenerate polynomials"
        return Finding(Reason.PROOF_FORGED, detail), metrics
    wrong = sum(not _within(difference, limits) for difference in differences)
    if wrong:
        detail = f"{wrong} of {len(differences)} commitments do not fit the policy's states"
        return Finding(Reason.COMMITMENT, detail), metrics
    return None, metrics


def _within(difference: ChunkDifference, limits: Limits) -> bool:
    # A short last chunk has fewer values; the limit on mismatches shrinks with it.
    mismatches_allowed = math.ceil(limits.exponent_mismatches * difference.compared / 128)
    # A wrong sign is as wrong as a wrong exponent; the measure of toploc does not see it.
    return (
        difference.exponent_mismatches + difference.sign_mismatches <= mismatches_allowed
        and difference.mantissa_mean <= limits.mantissa_mean
        and difference.mantissa_median <= limits.mantissa_median
    )
