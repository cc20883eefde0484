"""Choices, formats, JSON, parts, own code and reasoning-gym, each with its reason."""

from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.tasks import Score, Task, TaskSet, is_exact, score
from shoal.tasks.rewards import check_parts, score_all, task_score
from shoal.tasks.verifiers.registry import VERIFIERS, find_verifier


def task_of(task_type: str, info: dict[str, Any], **fields: Any) -> Task:
    return Task(problem_id="p", source="t", task_type=task_type, prompt="?", verification_info=info, **fields)


def scored(task_type: str, info: dict[str, Any], answer: str) -> Score:
    return score(task_of(task_type, info), f"hm</think>{answer}")


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("B", 1),
        ("(b)", 1),
        ("\\boxed{\\text{B}}", 1),
        ("The answer is (B).", 1),
        ("**Answer: B**", 1),
        ("B) because it is", 1),
        ("A", 0),
        ("I think B", 0),
        ("A or B", 0),
        ("B) or C)", 0),
        ("(B) or (C)", 0),
        ("\\boxed{A} \\boxed{B}", 0),
        ("\\boxed{B} \\boxed{B}", 1),
        ("\\boxed B", 1),
        ("", 0),
    ],
)
def test_a_choice_is_a_letter_in_its_place(answer: str, reward: float) -> None:
    assert scored("multiple_choice", {"answer": "B"}, answer).reward == reward


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("Paris", 1),
        (" Paris\n", 1),
        ("\\boxed{Paris}", 1),
        ("The answer is Paris.", 1),
        ("paris", 0),
        ("\\boxed{Rome} \\boxed{Paris}", 0),
    ],
)
def test_an_exact_match_is_exact(answer: str, reward: float) -> None:
    assert scored("exact_match", {"answer": "Paris"}, answer).reward == reward


def test_case_is_ignored_where_the_task_says_so() -> None:
    assert scored("exact_match", {"ground_truth": "Paris", "ignore_case": True}, "PARIS").reward == 1.0


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("<plan>a</plan><answer>b</answer>", "the format is right"),
        ("<answer>b</answer><plan>a</plan>", "out of order"),
        ("<plan>a</plan>", "<answer> occurs 0 times"),
        ("</think><plan>a</plan>", "closed twice"),
        ("  ", "nothing follows"),
    ],
)
def test_a_format_names_what_is_missing(answer: str, why: str) -> None:
    assert why in scored("format", {"tags": ["plan", "answer"]}, answer).why


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ('{"output": [1, 2]}', 1),
        ('It prints:\n```json\n{"output": [1, 2.0]}\n```', 1),
        ("[1, 2]", 1),
        ('{"output": [1, true]}', 0),
        ('{"output": [2, 1]}', 0),
        ("nothing", 0),
        ("[" * 100_000, 0),
    ],
)
def test_predicted_json_is_compared_as_json(answer: str, reward: float) -> None:
    assert scored("code_output_prediction", {"output": "[1, 2]"}, answer).reward == reward


@pytest.mark.parametrize(
    "text", ["\\boxed{" * 20_000, "```" * 20_000, "answer is " * 20_000, "{" * 100_000, "<answer>" * 20_000]
)
@pytest.mark.parametrize("kind", ["exact_match", "multiple_choice", "format", "json_output", "instruction_following"])
def test_no_text_makes_an_exact_verifier_slow(kind: str, text: str) -> None:
    info: dict[str, Any] = {"answer": "B", "output": 1, "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    assert scored(kind, info, text).reward in (0.0, 1.0)


def test_several_parts_are_weighed() -> None:
    info = {
        "parts": [
            {"task_type": "integer_answer", "verification_info": {"answer": 7}, "weight": 3},
            {"task_type": "format", "weight": 1},
        ]
    }
    assert scored("multi", info, "7") == Score(
        1.0, "integer_answer 1 (the answer is right); format 1 (the format is right)", True
    )
    assert scored("multi", info, "8").reward == 0.25
    assert find_verifier("multi").complaint({"parts": [{"task_type": "integer_answer"}]}) != ""
    assert find_verifier("multi").complaint({"parts": []}) != ""


def test_one_tolerant_part_makes_the_whole_tolerant() -> None:
    info = {
        "parts": [{"task_type": "verifiable_math", "verification_info": {"ground_truth": "7"}}, {"task_type": "format"}]
    }
    assert not scored("multi", info, "\\boxed{7}").exact


def test_the_reward_of_a_run_may_have_parts() -> None:
    task = task_of("integer_answer", {"answer": 7}, metadata={"format": {"tags": ["b"]}})
    parts = {"task": 0.9, "format": 0.1}
    check_parts(TaskSet([task]), parts)
    assert task_score(task, "</think>7", parts).reward == pytest.approx(0.9)
    assert task_score(task, "</think><b>7</b>", parts).reward == pytest.approx(0.1)
    assert task_score(task, "</think>7", parts).exact
    assert [found.reward for found in score_all([(task, "</think>7"), (task, "7")], {})] == [1.0, 0.0]


def test_parts_that_nobody_knows_or_that_a_task_cannot_have_are_refused_by_name() -> None:
    task = task_of("integer_answer", {"answer": 7}, metadata={"format": {"tags": ["b"]}})
    with pytest.raises(ConfigError, match=r"names exact_match, but task 1 \(.*\) has in its metadata: .*answer"):
        check_parts(TaskSet([with_answer(task), task]), {"exact_match": 1.0})
    with pytest.raises(ConfigError, match=r"reward.parts names polite: There is no verifier"):
        check_parts(TaskSet([task]), {"task": 0.9, "polite": 0.1})
    check_parts(TaskSet([task]), {"task": 0.9, "reward_model:polite": 0.1})


def with_answer(task: Task) -> Task:
    return task.model_copy(update={"metadata": {"exact_match": {"answer": "7"}}})


def test_an_own_verifier_is_named_by_module_and_function() -> None:
    own = task_of("tasks.own:says_one", {})
    assert score(own, "</think>1") == Score(1.0, "said '1' to '?'", True)
    assert is_exact("tasks.own:says_one")


def test_an_own_verifier_may_be_one_of_several_parts() -> None:
    info = {"parts": [{"task_type": "tasks.own:says_one"}, {"task_type": "format"}]}
    assert scored("multi", info, "1").why == "tasks.own:says_one 1 (said '1' to '?'); format 1 (the format is right)"


@pytest.mark.parametrize("name", ["tasks.own:not_marked", "tasks.own:absent", "no_such_module:f", "os:system", ":x"])
def test_nothing_else_is_called(name: str) -> None:
    with pytest.raises(ConfigError):
        score(task_of(name, {}), "</think>1")


def test_what_is_exact_and_what_is_tolerant_is_declared() -> None:
    tolerant = {name for name, found in VERIFIERS.items() if not found.exact}
    assert {"verifiable_math", "verifiable_code", "prime_rl_code", "reasoning_gym"} <= tolerant
    assert {"integer_answer", "exact_match", "multiple_choice", "format", "json_output"}.isdisjoint(tolerant)
