"""Each stage accepts honest work and names the right reason for each lie."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from shoal.policy.engine import Scored
from shoal.proofs.commitments import ProofError
from shoal.protocol.api import AuditMetrics
from shoal.protocol.rollouts import Rollout
from shoal.protocol.verdicts import Reason
from shoal.tasks import Outcome, Task, Verifier
from shoal.tasks.verifiers.registry import VERIFIERS
from shoal.validation import Checked, Finding, Limits, RejectedError, audit, check_claims, load_calibration
from shoal.validation.checks import check_sampling
from shoal.validation.validator import group_verdicts
from support.submissions import FULL_ROW, STOPPED_ROW, Submission, resampled, submit
from support.tiny_run import TinyRun

VOCABULARY = 320
EOS = 1
ORDINARY = 40


@pytest.fixture(scope="session")
def honest(tiny_run: TinyRun) -> Submission:
    return submit(tiny_run)


@pytest.fixture(scope="session")
def limits() -> Limits:
    found = load_calibration("bundled").limits("torch/float32/cpu")
    assert found is not None
    return found


@pytest.fixture
def check(tiny_run: TinyRun) -> Callable[[Submission], Checked]:
    """Every check that needs no policy."""
    return lambda submission: check_claims(submission.data, submission.claim(), tiny_run.workload, VOCABULARY)


@pytest.fixture
def examine(tiny_run: TinyRun, limits: Limits) -> Callable[[Submission], tuple[set[Reason], AuditMetrics]]:
    """The audit with the policy of version 0, skipping the checks before it."""

    def reasons(submission: Submission) -> tuple[set[Reason], AuditMetrics]:
        items = tiny_run.workload.items(bytes.fromhex(submission.lease.slot_seed))
        checked = Checked(submission.header, submission.rollouts, items, [])
        findings, metrics = audit(checked, tiny_run.engine(0), limits, 1.0, checked.rows_by_group())
        return {finding.reason for finding in findings}, metrics

    return reasons


def reason_of(check: Callable[[Submission], Checked], submission: Submission) -> Finding:
    with pytest.raises(RejectedError) as caught:
        check(submission)
    return caught.value.finding


def test_the_sample_submission_has_both_kinds_of_ending(honest: Submission) -> None:
    assert honest.rollouts[STOPPED_ROW].finish_reason == "stop"
    assert honest.rollouts[STOPPED_ROW].output_tokens[-1] == EOS
    assert honest.rollouts[FULL_ROW].finish_reason == "length"
    assert len(honest.rollouts[FULL_ROW].proofs) == 2


def test_honest_claims_pass_and_come_back_with_the_validators_rewards(
    check: Callable[[Submission], Checked], honest: Submission
) -> None:
    checked = check(honest)
    assert [reward.total for reward in checked.rewards] == [rollout.reward for rollout in honest.rollouts]
    assert [item.group for item in checked.items] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_bytes_that_are_no_rollout_file_break_the_schema(tiny_run: TinyRun, honest: Submission) -> None:
    for data in (b"", b"PAR1", honest.data[:-100], b"x" * 1000):
        with pytest.raises(RejectedError) as caught:
            check_claims(data, honest.claim(), tiny_run.workload, VOCABULARY)
        assert caught.value.finding.reason is Reason.SCHEMA


def test_more_rows_than_a_slot_can_hold_break_the_schema(
    check: Callable[[Submission], Checked], honest: Submission
) -> None:
    assert reason_of(check, replace(honest, rollouts=honest.rollouts * 2)).reason is Reason.SCHEMA


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run_id", "run-2"),
        ("step", 4),
        ("slot", 9),
        ("lease_id", "lease-of-another"),
        ("worker_key", "00" * 32),
        ("policy_version", 1),
        ("manifest_digest", "ff" * 32),
        ("numerics_class", "abacus/int2/wood"),
    ],
)
def test_a_header_that_contradicts_the_lease_is_named(
    check: Callable[[Submission], Checked], honest: Submission, field: str, value: object
) -> None:
    finding = reason_of(check, honest.with_header(**{field: value}))
    assert finding.reason is Reason.HEADER
    assert field.split("_")[0] in finding.detail


def swapped(rollouts: list[Rollout]) -> list[Rollout]:
    return [rollouts[1], rollouts[0], *rollouts[2:]]


@pytest.mark.parametrize(
    "lie",
    [
        lambda sent: replace(sent, rollouts=sent.rollouts[:-1]),
        lambda sent: replace(sent, rollouts=sent.rollouts[:4]),
        lambda sent: replace(sent, rollouts=swapped(sent.rollouts)),
        lambda sent: replace(sent, rollouts=sent.rollouts[4:] + sent.rollouts[:4]),
        lambda sent: sent.with_row(2, sample=1),
        lambda sent: sent.with_row(2, group=1),
        lambda sent: sent.with_row(2, task_id="chain-sums/10+10+10"),
        lambda sent: sent.with_row(2, target_length=64),
        lambda sent: sent.with_row(2, input_tokens=sent.rollouts[5].input_tokens),
        lambda sent: sent.changed(2, lambda row: replace(row, input_tokens=[*row.input_tokens, ORDINARY])),
    ],
    ids=[
        "row missing",
        "group missing",
        "rows swapped",
        "groups swapped",
        "sample twice",
        "other group",
        "other task",
        "other target",
        "other prompt",
        "longer prompt",
    ],
)
def test_work_that_the_slot_did_not_ask_for_is_named(
    check: Callable[[Submission], Checked], honest: Submission, lie: Callable[[Submission], Submission]
) -> None:
    assert reason_of(check, lie(honest)).reason is Reason.ASSIGNMENT


def with_token(row: Rollout, index: int, token: int) -> Rollout:
    tokens = list(row.output_tokens)
    tokens[index] = token
    return replace(row, output_tokens=tokens)


@pytest.mark.parametrize(
    "lie",
    [
        lambda row: with_token(row, 5, VOCABULARY),
        lambda row: with_token(row, 5, -1),
        lambda row: replace(row, segment_lengths=[38, 1, 1], output_logprobs=row.output_logprobs[:-1]),
        lambda row: replace(row, output_logprobs=row.output_logprobs[:-1]),
        lambda row: replace(row, output_logprobs=[math.nan, *row.output_logprobs[1:]]),
        lambda row: replace(row, output_logprobs=[-math.inf, *row.output_logprobs[1:]]),
        lambda row: replace(row, output_logprobs=[0.1, *row.output_logprobs[1:]]),
        lambda row: replace(row, reward=math.nan),
        lambda row: replace(row, task_reward=math.inf),
    ],
    ids=[
        "token too large",
        "token negative",
        "a turn that nobody asked for",
        "log-probability missing",
        "log-probability nan",
        "log-probability infinite",
        "log-probability above zero",
        "reward nan",
        "reward infinite",
    ],
)
def test_values_out_of_range_are_named(
    check: Callable[[Submission], Checked], honest: Submission, lie: Callable[[Rollout], Rollout]
) -> None:
    finding = reason_of(check, honest.changed(FULL_ROW, lie))
    assert finding.reason is Reason.BOUNDS
    assert finding.detail.startswith("row 0 ")


def test_a_row_without_tokens_is_no_rollout(check: Callable[[Submission], Checked], honest: Submission) -> None:
    empty = honest.with_row(FULL_ROW, output_tokens=[], output_logprobs=[], proofs=[])
    assert reason_of(check, empty).reason is Reason.SCHEMA


def test_a_token_too_many_is_out_of_bounds(check: Callable[[Submission], Checked], honest: Submission) -> None:
    def longer(row: Rollout) -> Rollout:
        return replace(row, output_tokens=[*row.output_tokens, ORDINARY], output_logprobs=[*row.output_logprobs, -1.0])

    assert reason_of(check, honest.changed(FULL_ROW, longer)).reason is Reason.BOUNDS


def test_a_sure_token_may_round_to_a_hair_above_zero(
    check: Callable[[Submission], Checked], honest: Submission
) -> None:
    check(honest.changed(0, lambda row: replace(row, output_logprobs=[2e-7, *row.output_logprobs[1:]])))


def shortened(row: Rollout, length: int) -> Rollout:
    return replace(
        row,
        output_tokens=row.output_tokens[:length],
        output_logprobs=row.output_logprobs[:length],
        proofs=row.proofs[:1],
    )


@pytest.mark.parametrize(
    "lie",
    [
        lambda row: with_token(row, 10, EOS),
        lambda row: shortened(row, 20),
        lambda row: replace(row, finish_reason="stop"),
        lambda row: replace(row, finish_reason="because"),
        lambda row: with_token(row, -1, EOS),
    ],
    ids=["goes on after the end", "stops early", "says stop", "says nonsense", "end token at the limit called length"],
)
def test_an_ending_that_cannot_be_is_named(
    check: Callable[[Submission], Checked], honest: Submission, lie: Callable[[Rollout], Rollout]
) -> None:
    assert reason_of(check, honest.changed(FULL_ROW, lie)).reason is Reason.TERMINATION


def test_a_stopped_row_may_not_say_length(check: Callable[[Submission], Checked], honest: Submission) -> None:
    assert reason_of(check, honest.with_row(STOPPED_ROW, finish_reason="length")).reason is Reason.TERMINATION


@pytest.mark.parametrize(
    "proofs",
    [lambda proofs: [], lambda proofs: proofs[:1], lambda proofs: [*proofs, proofs[0]]],
    ids=["none", "one missing", "one extra"],
)
def test_a_wrong_number_of_proofs_is_named(
    check: Callable[[Submission], Checked], honest: Submission, proofs: Callable[[list[bytes]], list[bytes]]
) -> None:
    lie = honest.changed(FULL_ROW, lambda row: replace(row, proofs=proofs(row.proofs)))
    assert reason_of(check, lie).reason is Reason.PROOF_FORMAT


@pytest.mark.parametrize(
    "lie",
    [
        lambda row: replace(row, task_reward=1.0, reward=1.0 - row.length_penalty),
        lambda row: replace(row, reward=row.reward + 1e-6),
        lambda row: replace(row, length_penalty=0.0, reward=row.task_reward),
    ],
    ids=["claims the answer", "a little more", "no penalty"],
)
def test_a_false_reward_of_an_exact_verifier_is_named_with_what_it_is_worth(
    check: Callable[[Submission], Checked], honest: Submission, lie: Callable[[Rollout], Rollout]
) -> None:
    finding = reason_of(check, honest.changed(4, lie))
    assert finding.reason is Reason.REWARD
    assert "row 4 claims reward" in finding.detail


def test_a_false_reward_of_a_tolerant_verifier_is_an_anomaly(
    check: Callable[[Submission], Checked], honest: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.tasks.verifiers import registry as verifiers

    tolerant = replace(verifiers.VERIFIERS["integer_answer"], exact=False)
    monkeypatch.setitem(verifiers.VERIFIERS, "integer_answer", tolerant)
    one_off = honest.with_row(0, task_reward=0.5)
    assert check(one_off).rewards == check(honest).rewards, "one differing verdict is nobody's fault"
    many_off = one_off
    for number in range(1, len(honest.rollouts)):
        many_off = many_off.with_row(number, task_reward=0.5)
    assert reason_of(check, many_off).reason is Reason.REWARD_TOLERANT


def test_a_verdict_that_a_limit_decided_is_held_against_nobody(
    check: Callable[[Submission], Checked], honest: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.tasks import Outcome
    from shoal.tasks.verifiers import registry as verifiers

    hurried = replace(
        verifiers.VERIFIERS["integer_answer"], verify=lambda task, text: Outcome(0.0, "took too long", limited=True)
    )
    monkeypatch.setitem(verifiers.VERIFIERS, "integer_answer", hurried)
    claimed = honest
    for number in range(len(honest.rollouts)):
        claimed = claimed.with_row(number, task_reward=1.0, reward=1.0)
    assert {reward.task_reward for reward in check(claimed).rewards} == {0.0}


def costly(reward: float, cost_s: float) -> Verifier:
    return Verifier(lambda task, text: Outcome(reward, "ran", cost_s=cost_s), exact=False, costly=True)


def claiming(submission: Submission, reward: float) -> Submission:
    for number, rollout in enumerate(submission.rollouts):
        submission = submission.with_row(number, task_reward=reward, reward=reward - rollout.length_penalty)
    return submission


def test_claims_that_three_times_the_budget_cannot_pay_for_are_an_anomaly(
    check: Callable[[Submission], Checked], honest: Submission, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of five seconds each: an honest worker would have stopped after a few, and claimed nothing for the others."""
    monkeypatch.setitem(VERIFIERS, "integer_answer", costly(1.0, tiny_run.workload.descriptor.scoring_s))
    finding = reason_of(check, claiming(honest, 1.0))
    assert finding.reason is Reason.REWARD_TOLERANT
    assert "row 3 claims reward" in finding.detail
    assert "cost too much" in finding.detail


def test_a_worker_that_stopped_at_its_own_budget_is_not_penalised(
    check: Callable[[Submission], Checked], honest: Submission, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERIFIERS, "integer_answer", costly(1.0, tiny_run.workload.descriptor.scoring_s))
    claimed = claiming(honest, 0.0)
    claimed = claimed.with_row(0, task_reward=1.0, reward=1.0 - honest.rollouts[0].length_penalty)
    checked = check(claimed)
    assert [reward.task_reward for reward in checked.rewards[:4]] == [1.0, 1.0, 1.0, 0.0]
    assert not any(group.useful for group in group_verdicts(checked)[1:]), "what was not scored teaches nothing"


def test_a_slower_worker_may_claim_less_than_the_validator_finds(
    check: Callable[[Submission], Checked], honest: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERIFIERS, "integer_answer", costly(1.0, 0.0))
    assert {reward.task_reward for reward in check(claiming(honest, 0.0)).rewards} == {1.0}
    monkeypatch.setitem(VERIFIERS, "integer_answer", costly(0.0, 0.0))
    assert reason_of(check, claiming(honest, 1.0)).reason is Reason.REWARD_TOLERANT


def test_a_validator_that_is_too_slow_holds_nothing_against_the_worker(
    check: Callable[[Submission], Checked], honest: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERIFIERS, "integer_answer", costly(1.0, 0.0))
    monkeypatch.setattr("shoal.tasks.workload.WALL_SLACK", -1.0)
    checked = check(claiming(honest, 1.0))
    assert {(reward.task_reward, reward.scored) for reward in checked.rewards} == {(0.0, False)}
    assert not any(group.useful for group in group_verdicts(checked))


def test_a_lie_about_a_cheap_row_is_found_before_a_costly_one_is_scored(
    honest: Submission, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(task: Task, text: str) -> Outcome:
        raise AssertionError("a costly answer was scored")

    monkeypatch.setitem(VERIFIERS, "costly", Verifier(explode, exact=False, costly=True))
    items = tiny_run.workload.items(bytes.fromhex(honest.lease.slot_seed))
    mixed = [
        replace(item, task=item.task.model_copy(update={"task_type": "costly"})) if item.sample else item
        for item in items
    ]
    monkeypatch.setattr(tiny_run.workload, "items", lambda seed: mixed)
    last = max(number for number, item in enumerate(items) if not item.sample)
    lie = honest.with_row(last, task_reward=0.25)
    with pytest.raises(RejectedError) as caught:
        check_claims(lie.data, lie.claim(), tiny_run.workload, VOCABULARY)
    assert caught.value.finding.reason is Reason.REWARD


def test_an_audit_finds_nothing_in_honest_work(
    examine: Callable[[Submission], tuple[set[Reason], AuditMetrics]], honest: Submission
) -> None:
    reasons, metrics = examine(honest)
    assert reasons == set()
    assert metrics.tokens == sum(len(rollout.output_tokens) for rollout in honest.rollouts)
    assert metrics.rounding_flips == 0
    assert metrics.exponent_mismatches_max == 0


def test_an_audit_finds_an_edited_token(
    examine: Callable[[Submission], tuple[set[Reason], AuditMetrics]], honest: Submission
) -> None:
    edited = honest.changed(FULL_ROW, lambda row: with_token(row, 12, (row.output_tokens[12] + 7) % 300 + 5))
    reasons, metrics = examine(edited)
    assert Reason.SAMPLING in reasons
    assert metrics.margin_max > 0.0025


def test_an_audit_finds_a_forced_ending(
    examine: Callable[[Submission], tuple[set[Reason], AuditMetrics]], honest: Submission
) -> None:
    def ended(row: Rollout) -> Rollout:
        return with_token(replace(shortened(row, 9), finish_reason="stop"), -1, EOS)

    assert Reason.SAMPLING in examine(honest.changed(FULL_ROW, ended))[0]


def test_an_audit_finds_other_weights(
    examine: Callable[[Submission], tuple[set[Reason], AuditMetrics]], honest: Submission, tiny_run: TinyRun
) -> None:
    stale = resampled(honest, tiny_run, tiny_run.engine(1))
    assert {Reason.SAMPLING, Reason.COMMITMENT} <= examine(stale)[0]


def test_an_audit_finds_another_temperature_that_commitments_cannot_see(
    examine: Callable[[Submission], tuple[set[Reason], AuditMetrics]], honest: Submission, tiny_run: TinyRun
) -> None:
    reasons, _ = examine(resampled(honest, tiny_run, tiny_run.engine(0), temperature=0.7))
    assert Reason.SAMPLING in reasons
    assert Reason.COMMITMENT not in reasons


def test_an_audit_finds_false_logprobs(
    examine: Callable[[Submission], tuple[set[Reason], AuditMetrics]], honest: Submission
) -> None:
    sure = honest.changed(3, lambda row: replace(row, output_logprobs=[value / 2 for value in row.output_logprobs]))
    assert examine(sure)[0] == {Reason.LOGPROBS}


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (lambda proof: proof[:-2], Reason.PROOF_FORMAT),
        (lambda proof: b"", Reason.PROOF_FORMAT),
        (lambda proof: b"\x00\x01" + proof[2:], Reason.PROOF_FORMAT),
        (lambda proof: proof[:2] + b"\xff\xff" + proof[4:], Reason.PROOF_FORMAT),
        (lambda proof: proof[:4] + bytes(len(proof) - 4), Reason.PROOF_FORGED),
    ],
    ids=["too short", "empty", "other modulus", "coefficient too large", "constant polynomial"],
)
def test_an_audit_finds_malformed_and_degenerate_proofs(
    examine: Callable[[Submission], tuple[set[Reason], AuditMetrics]],
    honest: Submission,
    forge: Callable[[bytes], bytes],
    reason: Reason,
) -> None:
    forged = honest.changed(2, lambda row: replace(row, proofs=[forge(row.proofs[0]), row.proofs[1]]))
    assert examine(forged)[0] == {reason}


def test_an_audit_finds_a_proof_copied_from_another_row(
    examine: Callable[[Submission], tuple[set[Reason], AuditMetrics]], honest: Submission
) -> None:
    copied = honest.with_row(2, proofs=honest.rollouts[3].proofs)
    assert examine(copied)[0] == {Reason.COMMITMENT}


def test_states_that_are_no_numbers_are_the_validators_trouble(
    honest: Submission, tiny_run: TinyRun, limits: Limits
) -> None:
    class Broken:
        numerics_class = "torch/float32/cpu"

        def score(self, requests: list[object], *, temperature: float) -> list[Scored]:
            scored = tiny_run.engine(0).score(requests, temperature=temperature)  # type: ignore[arg-type]
            return [replace(scored[0], states=scored[0].states * torch.nan), *scored[1:]]

    items = tiny_run.workload.items(bytes.fromhex(honest.lease.slot_seed))
    with pytest.raises(ProofError):
        audit(Checked(honest.header, honest.rollouts, items, []), Broken(), limits, 1.0, [0])  # type: ignore[arg-type]


def margins(*lost: float, tokens: int = 1000) -> Scored:
    values = torch.zeros(tokens)
    values[: len(lost)] = torch.tensor(lost)
    rivals = torch.full((tokens, 4), 9.0)
    rivals[: len(lost), 0] = values[: len(lost)]
    return Scored(values, torch.zeros(tokens), torch.zeros(tokens, 1), rivals)


def sampling(limits: Limits, *lost: float) -> tuple[Reason | None, AuditMetrics]:
    finding, metrics = check_sampling([margins(*lost)], limits)
    return finding.reason if finding else None, metrics


def test_many_small_losses_are_an_anomaly_and_few_are_rounding(limits: Limits) -> None:
    noise, between = limits.margin_noise / 2, (limits.margin_noise + limits.margin_max) / 2
    allowed = limits.flips_allowed(1000)
    assert sampling(limits, *[noise] * 50)[0] is None
    assert sampling(limits, *[between] * allowed)[0] is None
    drifted, metrics = sampling(limits, *[between] * (allowed + 1))
    assert drifted is Reason.SAMPLING_DRIFT
    assert metrics.rounding_flips == allowed + 1
    assert metrics.margin_sum == pytest.approx((allowed + 1) * between)
    assert sampling(limits, limits.margin_max * 2)[0] is Reason.SAMPLING
