"""The validator penalises workers for lies and nobody for trouble of its own."""

import math
from collections.abc import Callable, Sequence

import pytest

from shoal.policy.engine import ScoreRequest
from shoal.protocol import api
from shoal.protocol.verdicts import Reason, Severity, most_severe, severity
from shoal.tasks.workload import Reward
from shoal.validation import Calibration, Checked, Validator, load_calibration
from shoal.validation.validator import group_verdicts, sample_digest
from shoal.worker import CHEATERS
from shoal.worker.slots import Version
from support.fake_coordinator import FakeCoordinator, Refuse
from support.samples import keypair
from support.submissions import SLOT, Submission, submit
from support.tiny_run import DiskWeights, Reports, TinyRun, version_digest

VALIDATOR = keypair("validator")


@pytest.fixture(scope="session")
def honest(tiny_run: TinyRun) -> Submission:
    return submit(tiny_run)


@pytest.fixture
def coordinator() -> FakeCoordinator:
    return FakeCoordinator()


Make = Callable[..., Validator]


@pytest.fixture
def make(tiny_run: TinyRun, coordinator: FakeCoordinator) -> Make:
    def validator(
        weights: DiskWeights | None = None, calibration: Calibration | None = None, **options: object
    ) -> Validator:
        engine = tiny_run.new_engine()
        return Validator(
            tiny_run.joined(weights or tiny_run.weights(0, 1)),
            coordinator.client(VALIDATOR),
            engine,
            calibration or load_calibration("bundled"),
            **options,  # type: ignore[arg-type]
        )

    return validator


def upload(coordinator: FakeCoordinator, submission: Submission, groups: Sequence[int] = (0, 1)) -> api.Claim:
    claim = submission.claim(audit_groups=groups)
    coordinator.files[claim.submission_id] = submission.data
    return claim


def upload_as(coordinator: FakeCoordinator, submission: Submission, submission_id: str) -> api.Claim:
    """One of several files that are there at once."""
    claim = submission.claim(audit_groups=(0, 1)).model_copy(update={"submission_id": submission_id})
    coordinator.files[submission_id] = submission.data
    return claim


def test_honest_work_is_accepted_with_verified_logprobs(
    make: Make, coordinator: FakeCoordinator, honest: Submission
) -> None:
    verdict = make().check(upload(coordinator, honest))
    assert (verdict.accepted, verdict.audited_groups) == (True, [0, 1])
    assert [group.group for group in verdict.groups] == [0, 1]
    assert verdict.metrics.tokens == sum(group.tokens for group in verdict.groups)


@pytest.mark.parametrize("groups", [(), (0, 1)])
def test_a_verdict_identifies_every_sample_by_its_tokens(
    make: Make, coordinator: FakeCoordinator, honest: Submission, groups: Sequence[int]
) -> None:
    verdict = make().check(upload(coordinator, honest, groups))
    found = [digest for group in verdict.groups for digest in group.samples]
    assert found == [sample_digest(rollout.output_tokens) for rollout in honest.rollouts]
    limits = load_calibration("bundled").limits(honest.header.numerics_class)
    assert limits is not None
    assert verdict.flips_allowed == limits.flips_between(sum(group.tokens for group in verdict.groups))


def test_one_other_token_or_another_order_makes_another_sample() -> None:
    samples = [[1, 2, 3], [1, 2, 4], [2, 1, 3], [1, 2], [1, 2, 3, 0], []]
    assert len({sample_digest(tokens) for tokens in samples}) == len(samples)


def test_without_the_audit_draw_claims_are_checked_and_the_policy_is_not_loaded(
    make: Make, coordinator: FakeCoordinator, honest: Submission, tiny_run: TinyRun
) -> None:
    weights = tiny_run.weights(0)
    verdict = make(weights).check(upload(coordinator, honest, []))
    assert (verdict.accepted, verdict.audited_groups) == (True, [])
    assert weights.fetched == []


def test_only_the_drawn_groups_are_computed_again(make: Make, coordinator: FakeCoordinator, honest: Submission) -> None:
    lie = honest.with_row(0, output_logprobs=[-9.0] * len(honest.rollouts[0].output_logprobs))
    verdict = make().check(upload(coordinator, lie, [1]))
    assert (verdict.accepted, verdict.audited_groups) == (True, [1])
    assert verdict.metrics.tokens == verdict.groups[1].tokens
    caught = make().check(upload(coordinator, lie, [0]))
    assert (caught.accepted, caught.reasons) == (False, [Reason.LOGPROBS])


def test_versions_are_loaded_once_and_swapped_when_the_lease_names_another(
    make: Make, coordinator: FakeCoordinator, honest: Submission, tiny_run: TinyRun
) -> None:
    weights = tiny_run.weights(0, 1)
    validator = make(weights)
    other = submit(tiny_run, slot=5, version=1)
    for submission in (honest, honest, other, honest):
        assert validator.check(upload(coordinator, submission)).accepted
    assert weights.fetched == [0, 1], "a version that is here is not fetched again"


@pytest.mark.parametrize(
    ("name", "audit", "reason"), [("stale", True, Reason.SAMPLING), ("rewards", False, Reason.REWARD)]
)
def test_the_cheaters_of_the_demo_are_proven_guilty(
    make: Make, coordinator: FakeCoordinator, tiny_run: TinyRun, name: str, audit: bool, reason: Reason
) -> None:
    class Cheater(CHEATERS[name]):  # type: ignore[misc, valid-type]
        def policy_path(self, version: Version, *, deadline_s: float) -> object:
            self._first_path = tiny_run.policies[1]
            return super().policy_path(version, deadline_s=deadline_s)

    lie = submit(tiny_run, kind=Cheater if name == "stale" else CHEATERS[name])
    verdict = make().check(upload(coordinator, lie, [0, 1] if audit else []))
    assert not verdict.accepted
    assert reason in verdict.reasons
    assert most_severe(list(verdict.reasons)) is Severity.PROOF
    assert verdict.groups == []


def test_only_the_decisive_findings_are_reported(make: Make, coordinator: FakeCoordinator, honest: Submission) -> None:
    edited = honest.with_row(0, output_tokens=[*honest.rollouts[0].output_tokens[:-1], 50])
    verdict = make().check(upload(coordinator, edited))
    assert {Reason.SAMPLING, Reason.LOGPROBS} <= set(verdict.reasons)
    assert "log-probability" not in verdict.detail


def test_a_file_that_is_gone_is_a_fault(make: Make, coordinator: FakeCoordinator, honest: Submission) -> None:
    claim = upload(coordinator, honest)
    coordinator.files[claim.submission_id] += b"rot"
    assert make().check(claim).reasons == [Reason.FILE_GONE]
    coordinator.refusals["/v1/submissions"] = Refuse("unknown_submission", status=404)
    assert make().check(claim).reasons == [Reason.FILE_GONE]


def test_a_version_that_is_gone_is_a_fault(
    make: Make, coordinator: FakeCoordinator, honest: Submission, tiny_run: TinyRun
) -> None:
    verdict = make(DiskWeights({}, [0])).check(upload(coordinator, honest))
    assert verdict.reasons == [Reason.VERSION_GONE]
    assert "Version 0 cannot be had" in verdict.detail


def test_a_numerics_class_without_calibration_is_a_fault(
    make: Make, coordinator: FakeCoordinator, honest: Submission
) -> None:
    empty = Calibration(model="other", made_with="hand", classes={})
    verdict = make(calibration=empty).check(upload(coordinator, honest))
    assert verdict.reasons == [Reason.NUMERICS_UNKNOWN]


def test_a_crash_while_checking_is_a_fault(make: Make, coordinator: FakeCoordinator, honest: Submission) -> None:
    validator = make()

    def explode(*args: object, **options: object) -> None:
        raise ZeroDivisionError("oh")

    validator.engine.score = explode  # type: ignore[method-assign, assignment]
    verdict = validator.check(upload(coordinator, honest))
    assert verdict.reasons == [Reason.VALIDATOR_CRASH]
    assert verdict.detail == "ZeroDivisionError: oh"
    assert most_severe(list(verdict.reasons)) is Severity.FAULT


def test_after_a_failed_load_the_next_submission_loads_again(
    make: Make, coordinator: FakeCoordinator, honest: Submission, tiny_run: TinyRun
) -> None:
    weights = tiny_run.weights(0, 1)
    validator = make(weights)
    assert validator.check(upload(coordinator, honest)).accepted
    assert validator.check(upload(coordinator, submit(tiny_run, version=1))).accepted
    weights.versions = {0: tiny_run.policies[0]}
    assert validator.check(upload(coordinator, honest)).accepted


def test_files_that_are_claimed_together_get_the_verdicts_that_each_gets_alone(
    make: Make, coordinator: FakeCoordinator, honest: Submission, tiny_run: TinyRun
) -> None:
    edited = honest.with_row(0, output_tokens=[*honest.rollouts[0].output_tokens[:-1], 50])
    false_claim = honest.with_row(0, reward=7.0)
    other = submit(tiny_run, slot=5)
    sent = [honest, edited, false_claim, other]
    alone = [make().check(upload(coordinator, submission)) for submission in sent]
    claims = [upload_as(coordinator, submission, f"submission-{number}") for number, submission in enumerate(sent)]
    together = [check.verdict for check in make().check_all(claims)]
    for one, other_verdict in zip(alone, together, strict=True):
        assert other_verdict is not None
        assert other_verdict.accepted == one.accepted
        assert other_verdict.reasons == one.reasons
        assert other_verdict.audited_groups == one.audited_groups
        assert other_verdict.metrics.tokens == one.metrics.tokens
    assert [verdict.accepted for verdict in alone] == [True, False, False, True]


def with_tokens(tiny_run: TinyRun, sent: Submission, tokens: Callable[[int, int], list[int]]) -> Submission:
    """Every row says that it drew what `tokens` gives for its number and the longest length; nothing but an audit sees the lie."""
    workload = tiny_run.workload
    ends, limit = workload.codec.eos_token_ids, workload.descriptor.rollouts.max_new_tokens
    for number, item in enumerate(workload.items(bytes.fromhex(sent.lease.slot_seed))):
        output = tokens(number, limit)
        output += [] if len(output) == limit else [ends[0]]
        worth = workload.reward(item.task, item.target_length, output)
        claims = {
            "output_tokens": output,
            "output_logprobs": [-1.0] * len(output),
            "proofs": [sent.rollouts[0].proofs[0]] * workload.chunk_count(len(output)),
            "finish_reason": "stop" if output[-1] in ends else "length",
            "task_reward": worth.task_reward,
            "length_penalty": worth.length_penalty,
            "reward": worth.total,
        }
        sent = sent.with_row(number, **claims)
        sent = sent.with_row(number, segment_lengths=[len(output)])
    return sent


def with_logprobs(submission: Submission, value: float) -> Submission:
    return submission.with_row(0, output_logprobs=[value] * len(submission.rollouts[0].output_logprobs))


def with_proof(submission: Submission, proof: bytes) -> Submission:
    return submission.with_row(0, proofs=[proof] * len(submission.rollouts[0].proofs))


SEEN_BY_AN_AUDIT: dict[str, Callable[[int, int], list[int]]] = {
    "one token for ever": lambda row, limit: [40] * limit,
    "all the same": lambda row, limit: [*range(40, 40 + limit)],
    "other last tokens": lambda row, limit: [*range(40, 39 + limit), 90 + row],
    "each longer by one": lambda row, limit: [*range(40, 41 + row)],
    "ends at once": lambda row, limit: [],
}
HOSTILE: dict[str, Callable[[TinyRun, Submission], Submission]] = {
    **{
        name: lambda run, sent, tokens=tokens: with_tokens(run, sent, tokens)  # type: ignore[misc]
        for name, tokens in SEEN_BY_AN_AUDIT.items()
    },
    "least log-probabilities": lambda run, sent: with_logprobs(sent, -3.4e38),
    "no number as a claim": lambda run, sent: with_logprobs(sent, math.nan),
    "infinite claims": lambda run, sent: with_logprobs(sent, -math.inf),
    "impossible proofs": lambda run, sent: with_proof(sent, b"\xff" * 258),
    "empty proofs": lambda run, sent: with_proof(sent, b""),
    "a class that is not admitted": lambda run, sent: sent.with_header(numerics_class="torch/int4/cpu"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_rejected_for_what_they_are_and_change_no_other_verdict(
    make: Make,
    coordinator: FakeCoordinator,
    honest: Submission,
    tiny_run: TinyRun,
    name: str,
) -> None:
    hostile = HOSTILE[name]
    sent = [hostile(tiny_run, submit(tiny_run, slot=5)), honest, hostile(tiny_run, honest)]
    alone = make().check(upload(coordinator, honest))
    claims = [upload_as(coordinator, one, f"submission-{number}") for number, one in enumerate(sent)]
    first, own, last = (check.verdict for check in make().check_all(claims))
    assert own is not None
    assert own.accepted
    assert own.metrics.drift_llrs == pytest.approx(alone.metrics.drift_llrs, abs=0.01)
    for verdict in (first, last):
        assert verdict is not None
        assert not verdict.accepted
        assert all(severity(reason) is not Severity.FAULT for reason in verdict.reasons), verdict.detail
        assert (Reason.SAMPLING in verdict.reasons) == (name in SEEN_BY_AN_AUDIT), verdict.detail
        api.VerdictBody.model_validate_json(verdict.model_dump_json())


def test_files_that_are_claimed_together_share_a_pass(
    make: Make, coordinator: FakeCoordinator, honest: Submission, tiny_run: TinyRun
) -> None:
    validator, calls = make(), []
    score = validator.engine.score

    def counted(requests: Sequence[object], **options: object) -> object:
        calls.append(len(requests))
        return score(requests, **options)  # type: ignore[arg-type]

    validator.engine.score = counted  # type: ignore[method-assign, assignment]
    sent = [honest, submit(tiny_run, slot=5)]
    checks = validator.check_all(
        [upload_as(coordinator, submission, f"submission-{number}") for number, submission in enumerate(sent)]
    )
    assert [check.verdict.accepted for check in checks if check.verdict] == [True, True]
    assert calls == [sum(len(submission.rollouts) for submission in sent)]


def test_a_file_that_breaks_a_common_audit_costs_the_others_nothing(
    make: Make, coordinator: FakeCoordinator, honest: Submission, tiny_run: TinyRun
) -> None:
    validator = make()
    score, poison = validator.engine.score, submit(tiny_run, slot=5)
    poisoned = {tuple(row.output_tokens) for row in poison.rollouts} - {
        tuple(row.output_tokens) for row in honest.rollouts
    }

    def failing(requests: Sequence[ScoreRequest], **options: float) -> object:
        if any(request.output_tokens in poisoned for request in requests):
            raise MemoryError("too long")
        return score(requests, **options)

    validator.engine.score = failing  # type: ignore[method-assign, assignment]
    claims = [upload_as(coordinator, one, f"submission-{number}") for number, one in enumerate((honest, poison))]
    fine, broken = (check.verdict for check in validator.check_all(claims))
    assert fine is not None
    assert fine.accepted
    assert broken is not None
    assert broken.reasons == [Reason.VALIDATOR_CRASH]


def test_a_version_that_cannot_be_had_is_asked_for_once_for_all_files(
    make: Make, coordinator: FakeCoordinator, honest: Submission, tiny_run: TinyRun
) -> None:
    weights = tiny_run.weights(0, 1)
    weights.closed = True
    validator, asked = make(weights), list[int]()
    fetch = weights.fetch_version

    def counted(version: int, *arguments: object, **options: object) -> object:
        asked.append(version)
        return fetch(version, *arguments, **options)  # type: ignore[arg-type]

    weights.fetch_version = counted  # type: ignore[method-assign, assignment]
    sent = [honest, submit(tiny_run, slot=5)]
    checks = validator.check_all(
        [upload_as(coordinator, submission, f"submission-{number}") for number, submission in enumerate(sent)]
    )
    assert [check.verdict.reasons for check in checks if check.verdict] == [[Reason.VERSION_GONE]] * 2
    assert asked == [0]


def test_it_asks_only_for_files_of_versions_that_it_has_and_gets_the_others(
    make: Make, coordinator: FakeCoordinator, honest: Submission, tiny_run: TinyRun
) -> None:
    wanted = api.WantedVersion(version=1, manifest_digest=version_digest(1))
    coordinator.claims = [
        api.ClaimAnswer(missing=[wanted], run_state="running"),
        *[api.ClaimAnswer(run_state="running")] * 2,
        api.ClaimAnswer(claim=upload(coordinator, submit(tiny_run, version=1)), run_state="running"),
        api.ClaimAnswer(run_state="finished"),
    ]
    validator = make()
    validator.run()
    asked = [api.ClaimBody.model_validate_json(body) for path, body in coordinator.tries if path == "/v1/claims"]
    assert (asked[0].ready, asked[0].fetching) == ([], [])
    assert version_digest(1) in (asked[-1].ready or [])
    assert [verdict.accepted for verdict in coordinator.verdicts] == [True]


def test_it_fetches_a_version_when_it_is_published_and_not_with_its_first_file(
    make: Make, coordinator: FakeCoordinator, tiny_run: TinyRun
) -> None:
    validator, published = make(), api.WantedVersion(version=1, manifest_digest=version_digest(1))
    coordinator.claims = [
        api.ClaimAnswer(claim=upload(coordinator, submit(tiny_run)), newest=published, run_state="running"),
        *[api.ClaimAnswer(run_state="running")] * 2,
    ]
    answers = list[api.ClaimAnswer]()

    def claim(body: api.ClaimBody) -> api.ClaimAnswer:
        """Asked again until the version is there, without a file that needs it."""
        if coordinator.claims:
            answers.append(coordinator.claims.pop(0))
            return answers[-1]
        assert body.newest == version_digest(1)
        return api.ClaimAnswer(run_state="finished" if version_digest(1) in (body.ready or []) else "running")

    validator.client.claim = claim  # type: ignore[method-assign]
    validator.run()
    assert [verdict.accepted for verdict in coordinator.verdicts] == [True]


@pytest.mark.parametrize("breaks", [False, True])
def test_the_engine_is_warm_before_the_first_file_and_need_not_be(
    make: Make, coordinator: FakeCoordinator, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    validator, published = make(), api.WantedVersion(version=0, manifest_digest=version_digest(0))
    score, scored = validator.engine.score, list[int]()

    def count(requests: Sequence[ScoreRequest], *, temperature: float) -> object:
        scored.append(len(requests))
        if breaks and len(scored) == 1:
            raise RuntimeError("no kernel for this machine")
        return score(requests, temperature=temperature)

    def claim(body: api.ClaimBody) -> api.ClaimAnswer:
        """The file comes when the engine has scored something, and the run ends with it."""
        if coordinator.verdicts:
            return api.ClaimAnswer(run_state="finished")
        file = upload(coordinator, submit(tiny_run)) if scored else None
        return api.ClaimAnswer(claim=file, newest=None if body.newest else published, run_state="running")

    monkeypatch.setattr(validator.engine, "score", count)
    validator.client.claim = claim  # type: ignore[method-assign]
    validator.run()
    assert [verdict.accepted for verdict in coordinator.verdicts] == [True]
    assert len(scored) == 2, "once before the file, once for it"


def test_traces_are_sent_when_all_verdicts_are(make: Make, coordinator: FakeCoordinator, tiny_run: TinyRun) -> None:
    claims = [upload_as(coordinator, submit(tiny_run), name * 32) for name in "ab"]
    coordinator.claims = [
        api.ClaimAnswer(claim=claims[0], beside=claims[1:], run_state="running"),
        api.ClaimAnswer(run_state="finished"),
    ]
    make().run()
    sent = [path for path, _ in coordinator.tries if path in ("/v1/verdicts", "/v1/traces")]
    assert sent == ["/v1/verdicts", "/v1/verdicts", "/v1/traces", "/v1/traces"]


def test_at_the_end_it_does_not_wait_for_a_version_that_no_file_needs(
    make: Make, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.claims = [api.ClaimAnswer(run_state="finished")]
    validator = make()
    monkeypatch.setattr(validator.versions, "fetching", lambda: [version_digest(1)])
    validator.run()


@pytest.mark.parametrize(("fetching_s", "wait_s"), [(0.0, 0.05), (0.3, 0.3), (600.0, 2.0)])
def test_files_of_a_version_do_not_wait_longer_than_its_fetch_took(
    make: Make, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, fetching_s: float, wait_s: float
) -> None:
    """A claim that waited two seconds beside a fetch of 50 ms made every batch two seconds late."""
    coordinator.claims = [api.ClaimAnswer(run_state="running"), api.ClaimAnswer(run_state="finished")]
    validator, fetches = make(), iter([[version_digest(1)], []])
    monkeypatch.setattr(validator.versions, "fetching", lambda: next(fetches))
    monkeypatch.setattr(validator.versions, "fetching_s", lambda: fetching_s)
    validator.run()
    asked = [api.ClaimBody.model_validate_json(body) for path, body in coordinator.tries if path == "/v1/claims"]
    assert [body.wait_s for body in asked] == [wait_s, 20.0]


def test_small_files_are_asked_for_in_numbers_and_slow_ones_alone(make: Make) -> None:
    validator = make()
    assert validator.most_together() == 1, "nothing is known yet"
    validator.took(0.01)
    validator.took(0.01)
    assert 1 < validator.most_together() <= api.MOST_CLAIMS
    for _ in range(8):
        validator.took(60.0)
    assert validator.most_together() == 1


def test_it_checks_until_the_run_is_finished_and_says_who_was_rejected(
    make: Make, coordinator: FakeCoordinator, honest: Submission
) -> None:
    claim = upload(coordinator, honest.with_row(0, reward=7.0))
    coordinator.claims = [
        api.ClaimAnswer(run_state="running"),
        api.ClaimAnswer(claim=claim, run_state="finished"),
        api.ClaimAnswer(run_state="finished"),
    ]
    reports = Reports()
    make(report=reports).run()
    assert [verdict.reasons for verdict in coordinator.verdicts] == [[Reason.REWARD]]
    assert reports.some(f"step 3 slot {SLOT}: row 0 claims reward 7")


def test_it_outlives_a_coordinator_that_is_away(make: Make, coordinator: FakeCoordinator, honest: Submission) -> None:
    claim = upload(coordinator, honest)
    coordinator.claims = [api.ClaimAnswer(claim=claim, run_state="running"), api.ClaimAnswer(run_state="finished")]
    validator = make(report=(reports := Reports()))
    validator.client = coordinator.client(deadline_s=3600.0, on_wait=reports)
    coordinator.away = {"/v1/claims": 30, "/v1/submissions": 30, "/v1/verdicts": 30}
    validator.run()
    assert (
        reports == ["Waiting for the coordinator at http://coordinator, for up to 60 minutes: connection refused."] * 3
    )
    assert [verdict.accepted for verdict in coordinator.verdicts] == [True]


def test_a_class_that_the_coordinator_admitted_and_this_validator_does_not_know_penalises_nobody(
    make: Make, coordinator: FakeCoordinator, honest: Submission
) -> None:
    newer = honest.with_header(numerics_class="vllm/bfloat16/cuda")
    coordinator.files["submission-00000001"] = newer.data
    known = newer.claim(numerics_class="vllm/bfloat16/cuda")
    assert make().check(known).reasons == [Reason.NUMERICS_UNKNOWN]
    false = newer.claim(numerics_class="torch/float32/cpu")
    verdict = make().check(false)
    assert verdict.reasons == [Reason.HEADER]
    assert "its key registered 'torch/float32/cpu'" in verdict.detail


def test_groups_are_useful_only_if_their_task_rewards_differ(tiny_run: TinyRun, honest: Submission) -> None:
    items = tiny_run.workload.items(bytes.fromhex(honest.lease.slot_seed))
    task_rewards = [0, 1, 0, 0, 1, 1, 1, 1]
    rewards = [
        Reward(float(reward), 0.01 * number, reward - 0.01 * number, "", True)
        for number, reward in enumerate(task_rewards)
    ]
    first, second = group_verdicts(Checked(honest.header, honest.rollouts, items, rewards))
    assert (first.useful, second.useful) == (True, False)
    assert first.task_rewards == [0.0, 1.0, 0.0, 0.0]
    assert second.rewards == pytest.approx([0.96, 0.95, 0.94, 0.93])
    assert second.task_id == items[4].task.problem_id
    assert second.tokens == sum(len(rollout.output_tokens) for rollout in honest.rollouts[4:])
