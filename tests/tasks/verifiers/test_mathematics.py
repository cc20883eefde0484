import pytest

from shoal.tasks import Task, score
from shoal.tasks.verifiers.mathematics import decide, tidy
from shoal.tasks.verifiers.scorer_pool import ScorerPool


def judge(truth: object, answer: str) -> tuple[float, bool]:
    task = Task(
        problem_id="p", source="t", task_type="verifiable_math", prompt="?", verification_info={"ground_truth": truth}
    )
    found = score(task, f"hm</think>So {answer}")
    assert not found.exact
    return found.reward, found.limited


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("42", "\\boxed{42}"),
        (42, "\\boxed{42.0}"),
        ("42", "first \\boxed{41}, then \\boxed{ 42 }."),
        ("42", "the final answer is 42."),
        ("42", "#### 42"),
        ("1,000,000", "\\boxed{1000000}"),
        ("\\frac{1}{2}", "\\boxed{\\dfrac{1}{2}}"),
        ("$(1, 2)$", "\\boxed{\\left(1,2\\right)}"),
        ("\\boxed{7}", "\\boxed{7}"),
        ("7", "\\boxed{\\boxed{7}}"),
    ],
)
def test_what_needs_no_algebra_is_decided_at_once(truth: object, answer: str) -> None:
    assert judge(truth, answer) == (1.0, False)


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("\\frac{1}{2}", "\\boxed{0.5}"),
        ("x^2+2x+1", "\\boxed{(x+1)^2}"),
        ("\\sqrt{8}", "\\boxed{2\\sqrt{2}}"),
        ("\\{1,2\\}", "\\boxed{\\{2,1\\}}"),
        ("10", "\\boxed{10\\text{ cm}}"),
    ],
)
def test_equal_mathematics_in_other_words_is_right(truth: str, answer: str) -> None:
    assert judge(truth, answer) == (1.0, False)


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("42", "\\boxed{43}"),
        ("42", "42"),
        ("(1,2)", "\\boxed{(2,1)}"),
        ("42", "\\boxed{42"),
        ("7", "\\boxed{" + "9" * 2000 + "}"),
    ],
)
def test_wrong_absent_and_endless_answers_earn_nothing(truth: str, answer: str) -> None:
    assert judge(truth, answer)[0] == 0.0


def test_a_tower_of_powers_ends_in_nothing_and_the_next_answer_is_judged() -> None:
    judges = ScorerPool("math", 1, timeout_s=60.0)
    try:
        assert judges.ask("7", "9^{9^{9^{9}}}") in (None, 0.0)
        assert judges.ask("\\frac{1}{2}", "0.5") == 1.0
    finally:
        judges.close()


def test_a_process_that_takes_too_long_is_killed_and_replaced() -> None:
    judges = ScorerPool("math", 1, timeout_s=0.0)
    try:
        assert judges.ask("x^2+2x+1", "(x+1)^2") is None
        judges._timeout_s = 60.0
        assert judges.ask("x^2+2x+1", "(x+1)^2") == 1.0
    finally:
        judges.close()


def test_ornaments_do_not_matter() -> None:
    assert tidy("$\\left( 1{,}000 \\right)$") == "(1000)"
    assert decide("1/2", "0.5") is None
    assert decide("0.50", ".5")
