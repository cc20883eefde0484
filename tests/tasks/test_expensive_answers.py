"""One submission of 64 answers that are made to be expensive, scored for real: the budget ends it, not their number."""

from os import cpu_count

import pytest

from shoal.config import ValidationConfig
from shoal.owner.create import SCORING_SHARE
from shoal.tasks import Task
from shoal.tasks.rewards import ScoringBudget, score_all
from shoal.tasks.sandbox.sandbox import LIMITS
from shoal.tasks.verifiers.registry import Score
from shoal.tasks.workload import WALL_SLACK

pytestmark = pytest.mark.slow

ANSWERS = 64
SCORING_S = ValidationConfig().claim_s * SCORING_SHARE
COMPUTES = "while True:\n    pass"
WAITS = "import time\ntime.sleep(10_000)"
FILLS = "rows = []\nwhile True:\n    rows.append(bytes(1 << 20))"
PRINTS = "while True:\n    print('x' * 1000)"
INTERVALS = [rf"(\sqrt{{{2 * n}}},\sqrt{{{2 * n + 1}}})" for n in range(1, 30)]


def budget() -> ScoringBudget:
    """As a validator has it with the default settings."""
    return ScoringBudget(SCORING_S, WALL_SLACK * SCORING_S)


def program(text: str) -> tuple[Task, str]:
    tests = {"test_cases": [{"type": "stdin_stdout", "input": "", "output": "1"}]}
    task = Task(problem_id="p", source="t", task_type="verifiable_code", prompt="?", verification_info=tests)
    return task, f"</think>\n```python\n{text}\n```"


def spent(scores: list[Score]) -> float:
    return sum(score.cost_s for score in scores)


@pytest.mark.parametrize("text", [COMPUTES, WAITS], ids=["computes", "waits"])
def test_programs_that_never_end_are_stopped_by_the_budget_of_the_submission(text: str) -> None:
    found = score_all([program(text) for _ in range(ANSWERS)], budget=budget())
    scored = [score for score in found if score.scored]
    together = cpu_count() or 1
    assert len(found) == ANSWERS
    assert {score.reward for score in found} == {0.0}
    assert 0 < len(scored) <= SCORING_S / (LIMITS.cpu_s / 3) + together
    before_the_last = sorted(score.cost_s for score in scored)[:-together]
    assert sum(before_the_last) <= SCORING_S, "answers were started after the budget was spent"


def test_expensive_programs_do_not_cost_cheap_answers_their_score() -> None:
    cheap = Task(problem_id="c", source="t", task_type="integer_answer", prompt="?", verification_info={"answer": 4})
    mixed = [program((COMPUTES, WAITS, FILLS, PRINTS)[number % 4]) for number in range(ANSWERS - 4)]
    found = score_all([*mixed, *[(cheap, "</think>4")] * 4], budget=budget())
    assert [(score.reward, score.scored) for score in found[-4:]] == [(1.0, True)] * 4
    assert not all(score.scored for score in found)
    assert {score.reward for score in found[:-4]} == {0.0}


def union(first: int) -> str:
    return r"\cup".join(INTERVALS[first:] + INTERVALS[:first])


def test_mathematics_that_is_expensive_to_compare_is_stopped_by_the_budget_of_the_submission() -> None:
    task = Task(
        problem_id="m",
        source="t",
        task_type="verifiable_math",
        prompt="?",
        verification_info={"ground_truth": union(0)},
    )
    answer = "</think>" + " ".join(rf"\boxed{{{union(first)}}}" for first in (3, 9, 14, 22))
    one = score_all([(task, answer)])[0]
    allowed = 5 * one.cost_s
    found = score_all([(task, answer)] * ANSWERS, budget=ScoringBudget(allowed, 1000.0))
    scored = [score for score in found if score.scored]
    assert one.reward == 1.0
    assert one.cost_s > 0.01, "the answer is not expensive"
    assert 0 < len(scored) < ANSWERS
    assert spent(scored[:-1]) <= allowed
