import pytest

from shoal.tasks import Outcome, Task, Verifier, length_penalty, score
from shoal.tasks.rewards import ScoringBudget, is_costly, score_all
from shoal.tasks.verifiers.registry import VERIFIERS


@pytest.mark.parametrize(("target", "length", "penalty"), [(20, 20, 0.0), (20, 25, 0.05), (20, 12, 0.08), (0, 99, 0.0)])
def test_penalty_grows_with_the_distance_from_the_target(target: int, length: int, penalty: float) -> None:
    assert length_penalty(target, length, 0.01) == pytest.approx(penalty)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the verifier `costly`, of five processor seconds an answer, was asked about."""
    asked: list[str] = []

    def verify(task: Task, text: str) -> Outcome:
        asked.append(text)
        return Outcome(1.0, "right", cost_s=5.0)

    monkeypatch.setitem(VERIFIERS, "costly", Verifier(verify, exact=False, costly=True))
    return asked


def pairs(kind: str, count: int) -> list[tuple[Task, str]]:
    info = {"answer": 4} if kind == "integer_answer" else {}
    task = Task(problem_id=kind, source="t", task_type=kind, prompt="?", verification_info=info)
    return [(task, f"</think>{number}") for number in range(count)]


def test_answers_beyond_the_budget_of_a_submission_are_not_scored(calls: list[str]) -> None:
    found = score_all(pairs("costly", 64), budget=ScoringBudget(30.0, 60.0))
    assert len(calls) == 6
    assert [score.reward for score in found] == [1.0] * 6 + [0.0] * 58
    assert {(score.scored, score.limited, score.exact) for score in found[6:]} == {(False, False, False)}


def test_cheap_answers_are_scored_whatever_the_costly_ones_cost(calls: list[str]) -> None:
    found = score_all(pairs("costly", 9) + pairs("integer_answer", 5), budget=ScoringBudget(30.0, 60.0))
    assert [score.reward for score in found[9:]] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert all(score.exact and score.scored for score in found[9:])


def test_a_machine_that_is_too_slow_is_known_by_the_clock(calls: list[str]) -> None:
    now = iter(range(0, 1000, 10))
    found = score_all(pairs("costly", 8), budget=ScoringBudget(1000.0, 25.0, clock=lambda: float(next(now))))
    assert len(calls) == 2
    assert {(score.scored, score.limited) for score in found[2:]} == {(False, True)}


def test_without_a_budget_everything_is_scored(calls: list[str]) -> None:
    assert sum(score.reward for score in score_all(pairs("costly", 64))) == 64


def test_a_part_of_the_reward_may_be_the_costly_one(calls: list[str]) -> None:
    (task, _), *_ = pairs("integer_answer", 1)
    assert not is_costly(task, {})
    assert not is_costly(task, {"task": 1.0, "format": 0.1})
    assert is_costly(task, {"task": 1.0, "costly": 0.1})
    (other, _), *_ = pairs("costly", 1)
    assert is_costly(other, {})
    assert not is_costly(other, {"format": 1.0})


def test_the_cost_of_own_code_is_measured() -> None:
    def verify(task: Task, text: str) -> Outcome:
        return Outcome(float(sum(range(200_000)) > 0), "computed", cost_s=2.0)

    task = Task(problem_id="p", source="t", task_type="spin", prompt="?", verification_info={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VERIFIERS, "spin", Verifier(verify, exact=True))
        assert score(task, "").cost_s > 2.0
