"""Hostile rows of segments beside honest ones: a run with episodes and plain completions, several files in one common audit."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from shoal.policy.engine import Scored, ScoreRequest
from shoal.protocol import api
from shoal.protocol.rollouts import Rollout
from shoal.protocol.segments import sampled_count, split_segments
from shoal.protocol.verdicts import Reason, Severity, severity
from shoal.tasks.task import TaskSet, TaskSets
from shoal.tasks.workload import WorkItem, Workload
from shoal.validation import Validator, load_calibration
from support.fake_coordinator import FakeCoordinator
from support.samples import keypair
from support.submissions import Submission, submit
from support.tiny_run import TinyRun, make_lease, make_tiny_run

ECHO = "tasks.environments.own_environments:Echo"
VALIDATOR = keypair("validator")
Said = Callable[[int, int], list[int]]
"""What a row says in a turn, given the number of the row and the longest length."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """Every other task is an episode, the others are scored by a verifier."""
    tiny = make_tiny_run(tmp_path_factory.mktemp("mixed"), environment=ECHO, observation_tokens=20)
    workload, tasks = tiny.workload, tiny.workload.tasks
    mixed = TaskSet(
        task.model_copy(update={"task_type": f"environment:{ECHO}"}) if number % 2 else task
        for number, task in enumerate(tasks.train)
    )
    settings = workload.descriptor.tasks.model_copy(update={"environment": ""})
    descriptor = workload.descriptor.model_copy(update={"tasks": settings, "task_set_digest": mixed.digest})
    return replace(tiny, workload=Workload(descriptor, workload.codec, TaskSets(mixed, tasks.heldout)))


def items_of(run: TinyRun, slot: int) -> list[WorkItem]:
    return run.workload.items(bytes.fromhex(make_lease(slot).slot_seed))


@pytest.fixture(scope="module")
def slots(run: TinyRun) -> tuple[int, int]:
    """Two that ask for an episode and a plain completion each."""
    first, second, *_ = [slot for slot in range(40) if len({item.environment for item in items_of(run, slot)}) == 2]
    return first, second


@pytest.fixture(scope="module")
def honest(run: TinyRun, slots: tuple[int, int]) -> Submission:
    return submit(run, slot=slots[0])


@pytest.fixture
def validator(run: TinyRun) -> Validator:
    engine = run.new_engine()
    return Validator(
        run.joined(run.weights(0, 1)), FakeCoordinator().client(VALIDATOR), engine, load_calibration("bundled")
    )


def verdicts(validator: Validator, sent: Sequence[Submission]) -> list[api.VerdictBody]:
    """Of files that were claimed together."""
    coordinator, claims = FakeCoordinator(), []
    for number, submission in enumerate(sent):
        claim = submission.claim().model_copy(update={"submission_id": f"submission-{number}"})
        coordinator.files[claim.submission_id] = submission.data
        claims.append(claim)
    validator.client = coordinator.client(VALIDATOR)
    found = [check.verdict for check in validator.check_all(claims)]
    assert all(verdict is not None for verdict in found)
    return [verdict for verdict in found if verdict is not None]


def episode_rows(run: TinyRun, sent: Submission) -> list[int]:
    return [row for row, item in enumerate(items_of(run, sent.lease.slot)) if item.environment]


def plain_rows(run: TinyRun, sent: Submission) -> list[int]:
    return [row for row, item in enumerate(items_of(run, sent.lease.slot)) if not item.environment]


def cut(row: Rollout, lengths: list[int], tokens: list[int] | None = None) -> Rollout:
    """The row in other segments, with as many claims as it then has sampled tokens."""
    count = max(0, min(sampled_count(lengths), 10_000))
    claims: dict[str, Any] = {"output_tokens": tokens or row.output_tokens, "segment_lengths": lengths}
    claims["output_logprobs"] = (row.output_logprobs * (count + 1))[:count]
    claims["proofs"] = (row.proofs * (count + 1))[: -(-count // 32)]
    return replace(row, **claims)


def changed(sent: Submission, rows: Sequence[int], change: Callable[[Rollout], Rollout]) -> Submission:
    return replace(sent, rollouts=[change(one) if at in rows else one for at, one in enumerate(sent.rollouts)])


CUTS: dict[str, Callable[[int], list[int]]] = {
    "no segment": lambda tokens: [],
    "an even number": lambda tokens: [tokens - 1, 1],
    "a segment of nothing": lambda tokens: [tokens - 1, 0, 1],
    "a negative one": lambda tokens: [tokens + 1, -2, 1],
    "sums beyond 32 bits": lambda tokens: [2**31 - 1, -(2**31), tokens + 1],
    "more than there are tokens": lambda tokens: [tokens, 1, 1],
    "the longest number": lambda tokens: [2**31 - 1],
    "each token one": lambda tokens: [1] * (tokens - 1 + tokens % 2) if tokens % 2 else [2, *[1] * (tokens - 2)],
    "thousands": lambda tokens: [1] * 20_001,
}


@pytest.mark.parametrize("where", [episode_rows, plain_rows])
@pytest.mark.parametrize("name", CUTS)
def test_impossible_segments_are_refused_before_anything_is_computed(
    validator: Validator,
    run: TinyRun,
    honest: Submission,
    name: str,
    where: Callable[[TinyRun, Submission], list[int]],
) -> None:
    alone = verdicts(validator, [honest])[0]
    lie = changed(honest, where(run, honest)[:1], lambda row: cut(row, CUTS[name](len(row.output_tokens))))
    first, own = verdicts(validator, [lie, honest])
    assert (own.accepted, own.audited_groups, own.metrics.tokens) == (True, [0, 1], alone.metrics.tokens)
    assert not first.accepted
    assert set(first.reasons) <= {Reason.SCHEMA, Reason.BOUNDS, Reason.REPLAY}, first.detail
    assert not first.audited_groups


def played(run: TinyRun, sent: Submission, say: Said) -> Submission:
    """Every row says what it likes, to the true environment where there is one: only an audit sees that nobody drew it."""
    workload = run.workload
    ends, limit = workload.codec.eos_token_ids, workload.descriptor.rollouts.max_new_tokens
    rows = []
    for number, (row, item) in enumerate(zip(sent.rollouts, items_of(run, sent.lease.slot), strict=True)):
        if item.environment:
            episode = workload.episode(item)
            while not episode.is_over:
                text = say(number, episode.turn_limit)[: episode.turn_limit]
                episode.take(text if len(text) == episode.turn_limit else [*text, ends[0]])
            worth, tokens, lengths, why = (
                workload.episode_reward(item, episode),
                episode.tokens,
                episode.lengths,
                str(episode.finish_reason),
            )
        else:
            text = say(number, limit)[:limit]
            tokens = text if len(text) == limit else [*text, ends[0]]
            worth, lengths = workload.reward(item.task, item.target_length, tokens), [len(tokens)]
            why = "stop" if tokens[-1] in ends else "length"
        claims = {"task_reward": worth.task_reward, "length_penalty": worth.length_penalty, "reward": worth.total}
        rows.append(replace(cut(row, lengths, tokens), finish_reason=why, **claims))  # type: ignore[arg-type]
    return replace(sent, rollouts=rows)


SAYINGS: dict[str, Said] = {
    "one token for ever": lambda row, limit: [80] * limit,
    "nothing": lambda row, limit: [],
    "all the same": lambda row, limit: [*range(80, 90)],
    "other last tokens": lambda row, limit: [*range(80, 90), 100 + row],
    "each longer by one": lambda row, limit: [*range(80, 81 + row)],
    "a word each": lambda row, limit: [80 + row],
}


@pytest.mark.parametrize("name", SAYINGS)
def test_episodes_that_nobody_drew_change_no_verdict_of_the_files_beside_them(
    validator: Validator, run: TinyRun, slots: tuple[int, int], honest: Submission, name: str
) -> None:
    alone = verdicts(validator, [honest])[0]
    sent = [played(run, submit(run, slot=slots[1]), SAYINGS[name]), honest, played(run, honest, SAYINGS[name])]
    first, own, last = verdicts(validator, sent)
    assert own.accepted, own.detail
    assert own.metrics.tokens == alone.metrics.tokens == sum(row.sampled_count for row in honest.rollouts)
    assert own.metrics.drift_llrs == pytest.approx(alone.metrics.drift_llrs, abs=0.01)
    for verdict in (first, last):
        assert not verdict.accepted
        assert Reason.SAMPLING in verdict.reasons, verdict.detail
        assert all(severity(reason) is not Severity.FAULT for reason in verdict.reasons)


VALUES = {"no number": math.nan, "infinite": -math.inf, "positive": 1.0, "least": -3.4e38}


@pytest.mark.parametrize("name", VALUES)
def test_claims_of_episodes_that_are_no_log_probabilities_cost_the_others_nothing(
    validator: Validator, run: TinyRun, honest: Submission, name: str
) -> None:
    row = episode_rows(run, honest)[0]
    values = [VALUES[name]] * len(honest.rollouts[row].output_logprobs)
    lie, own = verdicts(validator, [honest.with_row(row, output_logprobs=values), honest])
    assert own.accepted
    assert not lie.accepted
    assert set(lie.reasons) <= {Reason.BOUNDS, Reason.LOGPROBS}


def test_a_file_of_another_run_or_without_rows_costs_the_others_nothing(
    validator: Validator, honest: Submission
) -> None:
    strange = [
        honest.with_header(policy_version=1),
        honest.with_header(run_id="run-2"),
        replace(honest, rollouts=[]),
        replace(honest, rollouts=honest.rollouts[:4]),
        replace(honest, rollouts=honest.rollouts[::-1]),
    ]
    *others, own = verdicts(validator, [*strange, honest])
    assert own.accepted
    assert [verdict.accepted for verdict in others] == [False] * len(strange)
    assert {reason for verdict in others for reason in verdict.reasons} == {Reason.HEADER, Reason.ASSIGNMENT}


def lengths_of(kind: int, tokens: int) -> tuple[int, ...]:
    """Segments of a row that no environment gave, but that the engine must survive."""
    if kind % 3 == 0 or tokens < 3:
        return (tokens,)
    return (1, tokens - 2, 1) if kind % 3 == 1 else (*[1] * (tokens - 2), 2) if tokens % 2 == 0 else (1,) * tokens


def hostile_requests(of: Sequence[ScoreRequest]) -> list[ScoreRequest]:
    """The same prompts with the same, longer and shorter outputs, cut otherwise, many times over."""
    made = []
    for number, request in enumerate(of):
        output = request.output_tokens
        for kind, other in enumerate((output, output[:1], output[:-1] or output, (*output[:-1], 90), (80,) * 60)):
            lengths = lengths_of(kind + number, len(other))
            made.append(ScoreRequest(request.prompt_tokens, other, request.seed + kind, lengths))
    return made


def test_what_an_engine_says_of_a_row_does_not_depend_on_the_rows_beside_it(run: TinyRun, honest: Submission) -> None:
    engine = run.engine()
    requests = [
        ScoreRequest(item.prompt_tokens, tuple(row.output_tokens), item.seed, tuple(row.segment_lengths))
        for row, item in zip(honest.rollouts, items_of(run, honest.lease.slot), strict=True)
    ]
    alone = [engine.score([request], temperature=1.0)[0] for request in requests]
    hostile = hostile_requests(requests)
    for before, after in ((hostile, []), ([], hostile), (hostile[::2], hostile[1::2])):
        scored = engine.score([*before, *requests, *after], temperature=1.0)[len(before) :][: len(requests)]
        for one, other, request in zip(alone, scored, requests, strict=True):
            assert_same(one, other, request)


def assert_same(one: Scored, other: Scored, request: ScoreRequest) -> None:
    assert other.margins.shape[0] == request.sampled_count
    assert other.margins.tolist() == pytest.approx(one.margins.tolist(), abs=1e-4)
    assert other.logprobs.tolist() == pytest.approx(one.logprobs.tolist(), abs=1e-4)
    assert other.states.float().flatten().tolist() == pytest.approx(one.states.float().flatten().tolist(), abs=0.05)


def test_rows_of_the_fixture_have_segments_and_rows_beside_them_have_none(run: TinyRun, honest: Submission) -> None:
    segments = [len(split_segments(row.output_tokens, row.segment_lengths)) for row in honest.rollouts]
    assert max(segments[row] for row in episode_rows(run, honest)) >= 3
    assert {segments[row] for row in plain_rows(run, honest)} == {1}
