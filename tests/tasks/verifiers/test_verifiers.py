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


LAST = TASK.model_copy(update={"task_type": "last_number"})


@pytest.mark.parametrize(
    "text",
    [
        "</think>66",
        "</think>The sum of 47 and 19 is 66.",
        "9</think>12, 66",
        "</think>=66.0",
        "</think>85-66",
        "</think>066!",
        "</think>66</think>",
    ],
)
def test_right_last_number_earns_one(text: str) -> None:
    assert score(LAST, text).reward == 1.0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("66", "never closed"),
        ("</think>", "no number"),
        ("</think>sixty-six", "no number"),
        ("</think>66 or 67", "answered 67, expected 66"),
        ("</think>-66", "answered -66, expected 66"),
        ("</think>66.5", "answered 66.5"),
        ("</think>1,066", "answered 1,066"),
        ("</think>" + "6" * 1_000_000, "answered 666"),
    ],
)
def test_another_last_number_earns_nothing_and_says_why(text: str, why: str) -> None:
    result = score(LAST, text)
    assert result.reward == 0.0
    assert why in result.why


def test_last_numbers_know_signs_zero_and_thousands() -> None:
    def earned(answer: int, text: str) -> float:
        return score(LAST.model_copy(update={"verification_info": {"answer": answer}}), f"</think>{text}").reward

    assert earned(-3, "It is -3.") == earned(0, "-0") == earned(1_234_567, "1,234,567 people") == 1.0
    assert earned(-3, "It is 3.") == earned(0, "0.1") == 0.0
