"""Episodes of a tiny policy, as a worker uploads them and as a validator replays them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shoal.policy.reward_model import RewardModel, build_classifier
from shoal.protocol.rollouts import Rollout
from shoal.protocol.segments import sampled_values, split_segments
from shoal.protocol.verdicts import Reason, Severity, severity
from shoal.tasks.environments.host import HUNG, Called, EnvironmentHost, Session, shared_host
from shoal.tasks.rewards import ScoringBudget
from shoal.tasks.workload import Workload
from shoal.validation import Checked, RejectedError, audit, check_claims, load_calibration
from shoal.validation.replays import replay_rows
from shoal.validation.reward_models import RewardModelScorer
from shoal.worker.cheaters import ForgedToolCheater, HiddenTurnCheater
from support.submissions import Submission, submit
from support.tiny_run import TinyRun, make_tiny_run, save_policy

MODULE = "tasks.environments.own_environments"
VOCABULARY = 320


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("echo"), environment=f"{MODULE}:Echo", observation_tokens=20)


@pytest.fixture(scope="module")
def honest(run: TinyRun) -> Submission:
    return submit(run)


def check(run: TinyRun, sent: Submission) -> Checked:
    return check_claims(sent.data, sent.claim(), run.workload, VOCABULARY)


def reason_of(run: TinyRun, sent: Submission) -> tuple[Reason, str]:
    with pytest.raises(RejectedError) as caught:
        check(run, sent)
    return caught.value.finding.reason, caught.value.finding.detail


def parts(row: Rollout) -> list[list[int]]:
    return [list(part) for part in split_segments(row.output_tokens, row.segment_lengths)]


def with_parts(row: Rollout, segments: list[list[int]], **fields: Any) -> Rollout:
    """The row of other segments, with as many claims as it has sampled tokens."""
    tokens, lengths = [token for part in segments for token in part], [len(part) for part in segments]
    count = sum(lengths[::2])
    logprobs = (row.output_logprobs * (count + 1))[:count]
    proofs = (row.proofs * (count + 1))[: -(-count // 32)]
    changed: dict[str, Any] = {
        "output_tokens": tokens,
        "segment_lengths": lengths,
        "output_logprobs": logprobs,
        "proofs": proofs,
    }
    return replace(row, **changed, **fields)


def longest(sent: Submission) -> int:
    """The row with the most turns whose first one says something."""
    said = [number for number, row in enumerate(sent.rollouts) if row.segment_lengths[0] > 1]
    return max(said, key=lambda number: len(sent.rollouts[number].segment_lengths))


def test_honest_episodes_replay_and_pass_the_audit(run: TinyRun, honest: Submission) -> None:
    checked = check(run, honest)
    assert {len(row.segment_lengths) for row in honest.rollouts} >= {5}, "three turns"
    assert {row.finish_reason for row in honest.rollouts} >= {"done"}
    for row, reward in zip(honest.rollouts, checked.rewards, strict=True):
        assert reward.scored
        assert row.task_reward == reward.task_reward
        assert len(row.output_logprobs) == len(sampled_values(row.output_tokens, row.segment_lengths))
    limits = load_calibration("bundled").limits(honest.header.numerics_class)
    assert limits is not None
    findings, metrics = audit(checked, run.engine(), limits, 1.0, [0, 1])
    assert not findings
    assert metrics.tokens == checked.tokens == sum(row.sampled_count for row in honest.rollouts)


def forged_observation(row: Rollout) -> Rollout:
    first, given, *rest = parts(row)
    return with_parts(row, [first, [*given[:-4], given[-4] ^ 1, *given[-3:]], *rest])


def skipped_turn(row: Rollout) -> Rollout:
    segments = parts(row)
    return with_parts(row, segments[2:])


def hidden_turn(row: Rollout) -> Rollout:
    segments = parts(row)
    return with_parts(row, [segments[0], *segments[3:]])


def goes_on(row: Rollout) -> Rollout:
    segments = parts(row)
    return with_parts(row, [*segments, segments[1], segments[0]])


def stops_early(row: Rollout) -> Rollout:
    return with_parts(row, parts(row)[:3])


def action_changed(row: Rollout) -> Rollout:
    first, *rest = parts(row)
    assert len(first) > 1
    return with_parts(row, [[71 if first[0] != 71 else 72, *first[1:]], *rest])


def smuggled_control_tokens(row: Rollout) -> Rollout:
    first, given, *rest = parts(row)
    return with_parts(row, [first, [*given[:-3], 1, 4, 318, *given[-3:]], *rest])


@pytest.mark.parametrize(
    "lie",
    [
        forged_observation,
        skipped_turn,
        hidden_turn,
        goes_on,
        stops_early,
        action_changed,
        smuggled_control_tokens,
        lambda row: replace(row, finish_reason="turns"),
        lambda row: replace(row, finish_reason="stop"),
    ],
    ids=lambda lie: lie.__name__,
)
def test_an_episode_that_its_environment_did_not_give_is_a_proof(
    run: TinyRun, honest: Submission, lie: Callable[[Rollout], Rollout]
) -> None:
    row = longest(honest)
    reason, detail = reason_of(run, honest.changed(row, lie))
    assert reason is Reason.REPLAY
    assert severity(reason) is Severity.PROOF
    assert detail.startswith(f"row {row}, turn ")


def test_the_reward_of_another_episode_is_a_proof(run: TinyRun, honest: Submission) -> None:
    row = longest(honest)
    taken = honest.changed(row, lambda one: replace(one, task_reward=9.0, reward=9.0 - one.length_penalty))
    reason, detail = reason_of(run, taken)
    assert reason is Reason.REWARD
    assert "claims reward" in detail


def test_more_turns_than_the_environment_allows_are_out_of_bounds(run: TinyRun, honest: Submission) -> None:
    def many(row: Rollout) -> Rollout:
        segments = parts(row)
        return with_parts(row, [segments[0][:1], [40]] * 4 + [segments[0][:1]])

    assert reason_of(run, honest.changed(longest(honest), many))[0] is Reason.BOUNDS


def test_an_environment_that_does_not_repeat_itself_is_at_fault_and_not_the_worker(tmp_path: Path) -> None:
    name = f"{MODULE}:GlobalRandom"
    run = make_tiny_run(tmp_path, environment=name)
    sent = submit(run)
    shared_host(name).close()  # the next process draws other numbers
    reason, detail = reason_of(run, sent)
    assert reason is Reason.ENVIRONMENT
    assert severity(reason) is Severity.FAULT
    assert name in detail


def test_a_difference_of_a_tolerant_environment_is_no_proof(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path, environment=f"{MODULE}:TolerantEcho", observation_tokens=20)
    sent = submit(run)
    row = longest(sent)
    one = check(run, sent.changed(row, forged_observation))
    assert not one.rewards[row].scored, "its group is not used"
    many = sent
    for number, rollout in enumerate(sent.rollouts):
        if len(rollout.segment_lengths) > 1:
            many = many.changed(number, forged_observation)
    reason, _ = reason_of(run, many)
    assert severity(reason) is Severity.ANOMALY


@pytest.mark.parametrize(("cut_off", "reason"), [(2, Reason.REPLAY), (3, Reason.ENVIRONMENT)])
def test_a_confirming_replay_that_the_clock_cut_off_is_repeated(
    run: TinyRun, honest: Submission, monkeypatch: pytest.MonkeyPatch, cut_off: int, reason: Reason
) -> None:
    """A validator that was asleep for a minute neither loses a proof nor reports a fault of the environment at once."""
    row = next(number for number, one in enumerate(honest.rollouts) if len(one.segment_lengths) > 1)
    asleep, step = iter(range(cut_off)), Session.step

    def slept(session: Session, action: str) -> Called:
        if session in confirming and next(asleep, None) is not None:
            return Called(failed=HUNG, limited=True)
        return step(session, action)

    confirming: list[Session] = []
    opened = EnvironmentHost.open

    def opening(host: EnvironmentHost, step_s: int) -> Session:
        session = opened(host, step_s)
        confirming.extend([session] if host._hash_seed != "0" else [])
        return session

    monkeypatch.setattr(Session, "step", slept)
    monkeypatch.setattr(EnvironmentHost, "open", opening)
    assert reason_of(run, honest.changed(row, forged_observation))[0] is reason


@pytest.mark.parametrize("name", ["Raises", "Large", "NotANumber", "Leaves", "HalfSurrogate", "SaysTooDeep"])
def test_a_failing_environment_ends_the_episode_at_the_worker_and_in_the_replay(tmp_path: Path, name: str) -> None:
    run = make_tiny_run(tmp_path, environment=f"{MODULE}:{name}")
    sent = submit(run)
    failed = [number for number, row in enumerate(sent.rollouts) if row.finish_reason == "failed"]
    assert failed
    checked = check(run, sent)
    assert {checked.rewards[number].task_reward for number in failed} == {0.0}
    assert all(name in checked.rewards[number].why for number in failed)


def test_an_environment_that_never_ends_is_ended_by_the_limit_of_turns_or_tokens(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path, environment=f"{MODULE}:Endless")
    sent = submit(run)
    ended = [row for row in sent.rollouts if row.finish_reason == "turns"]
    assert ended
    assert {len(row.segment_lengths) for row in ended} == {7}, "four turns"
    assert {row.task_reward for row in ended} == {2.0}
    assert {row.finish_reason for row in sent.rollouts} <= {"turns", "context", "length"}
    assert all(reward.scored for reward in check(run, sent).rewards)


def test_an_environment_that_hangs_costs_its_episodes_and_is_nobodys_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.tasks.environments.host.WALL_SLACK", 0.3)
    monkeypatch.setattr("shoal.validation.replays.REPLAY_SLACK", 1.0)
    run = make_tiny_run(tmp_path, environment=f"{MODULE}:Hangs")
    sent = submit(run)
    hung = [number for number, row in enumerate(sent.rollouts) if row.finish_reason == "failed"]
    assert hung
    rewards = check(run, sent).rewards
    assert all("Hangs took too long in turn 1" in rewards[number].why for number in hung)


@pytest.mark.parametrize("count", [1, 3])
def test_a_failure_that_nobody_else_sees_is_not_used_and_often_is_an_anomaly(
    run: TinyRun, honest: Submission, count: int
) -> None:
    """A worker may not choose its episodes by saying that the environment failed in the others."""
    rows = [number for number, row in enumerate(honest.rollouts) if len(row.segment_lengths) > 1][:count]
    sent = honest
    for row in rows:
        penalty = honest.rollouts[row].length_penalty
        sent = sent.changed(row, partial(replace, finish_reason="failed", task_reward=0.0, reward=-penalty))
    if count == 1:
        assert not check(run, sent).rewards[rows[0]].scored
    else:
        assert severity(reason_of(run, sent)[0]) is Severity.ANOMALY


def test_replaying_stops_when_a_submission_has_cost_enough(run: TinyRun, honest: Submission) -> None:
    """No worker could have paid for that either; a clock that ran out is not held against one."""
    items = run.workload.items(bytes.fromhex(honest.lease.slot_seed))
    with pytest.raises(RejectedError, match="more rows are off"):
        replay_rows(honest.rollouts, items, budgeted(run, ScoringBudget(0.0, 60.0)), 0.1)
    late = replay_rows(honest.rollouts, items, budgeted(run, ScoringBudget(60.0, -1.0)), 0.1)
    played = [number for number, row in enumerate(honest.rollouts) if len(row.segment_lengths) > 1]
    assert not any(late.rewards[number].scored for number in played)


def budgeted(run: TinyRun, budget: ScoringBudget) -> Workload:
    workload = Workload(run.workload.descriptor, run.workload.codec, run.workload.tasks)
    workload.scoring_budget = lambda slack=1.0: budget  # type: ignore[method-assign]
    return workload


def test_the_cheaters_of_the_demo_are_caught(run: TinyRun) -> None:
    assert reason_of(run, submit(run, kind=ForgedToolCheater))[0] is Reason.REPLAY
    assert reason_of(run, submit(run, kind=HiddenTurnCheater))[0] is Reason.REPLAY


def test_a_reward_model_ranks_whole_episodes_and_leaves_what_the_environment_gave(
    run: TinyRun, honest: Submission, tmp_path: Path
) -> None:
    build_classifier(save_policy(tmp_path / "base", seed=5)).save_pretrained(tmp_path / "base")
    model, checked = RewardModel(str(tmp_path / "base")), check(run, honest)
    amended = RewardModelScorer({"polite": model}, {"task": 1.0, "reward_model:polite": 0.1}).amend(checked)
    for rows in checked.rows_by_group().values():
        prompt = checked.items[rows[0]].prompt_tokens
        chances = model.rank(prompt, [honest.rollouts[row].output_tokens for row in rows])
        gained = [amended.rewards[row].total - checked.rewards[row].total for row in rows]
        assert gained == pytest.approx([0.1 * chance for chance in chances])
    assert [one.task_reward for one in amended.rewards] == [one.task_reward for one in checked.rewards]
