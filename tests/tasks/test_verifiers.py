import pytest

from shoal.errors import ConfigError
from shoal.tasks import Task, is_exact, score

TASK = Task(
    problem_id="p",
    source="test",
    task_type="integer_answer",
    prompt="Compute 47+38-19.",
    verification_info={"answer": 66},
)


@pytest.mark.parametrize("text", ["85 66</think>66", "</think>66", "66</think> 66\n", "</think>+66", "</think>066"])
def test_right_integer_after_the_think_tag_earns_one(text: str) -> None:
    assert score(TASK, text).reward == 1.0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "never closed"),
        ("66", "never closed"),
        ("<think>66", "never closed"),
        ("66</think>", "not an integer"),
        ("</think>66 or 67", "not an integer"),
        ("</think>66</think>66", "not an integer"),
        ("</think>66.0", "not an integer"),
        ("</think>６６", "not an integer"),
        ("</think>6 6", "not an integer"),
        ("</think>" + "6" * 10_000, "not an integer"),
        ("</think>-66", "answered -66, expected 66"),
        ("</think>67", "answered 67, expected 66"),
    ],
)
def test_anything_else_earns_nothing_and_says_why(text: str, why: str) -> None:
    result = score(TASK, text)
    assert result.reward == 0.0
    assert why in result.why


def test_integer_answers_are_exact_so_a_false_claim_is_proof() -> None:
    assert is_exact("integer_answer")
    assert score(TASK, "").exact


def test_unknown_task_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="integer_answer"):
        score(TASK.model_copy(update={"task_type": "poetry"}), "")
    with pytest.raises(ConfigError):
        is_exact("poetry")
