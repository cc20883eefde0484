from typing import Any

import pytest

from shoal.tasks.environments.checking import check_environment, check_lines

MODULE = "tasks.environments.unrepeatable"


def failed(name: str, **given: Any) -> list[str]:
    options: dict[str, Any] = {"task": {}, "actions": ["a", "b"], "episodes": 2} | given
    return [check.name for check in check_environment(name, **options).checks if check.passed is False]


def test_the_built_in_environments_pass_as_exact() -> None:
    call = '</think><tool_call>{"name": "calculate", "arguments": {"expression": "47+38-19"}}</tool_call>'
    calculator = check_environment(
        "calculator", task={"answer": 66}, actions=[call, "</think>66"], solution=["</think>66"], episodes=2
    )
    guesses = check_environment("guess-number", task={}, actions=["50", "25"], solution=["18"], episodes=3)
    for found in (calculator, guesses):
        assert (found.passed, found.replay) == (True, "exact"), check_lines(found)
    assert "guess-number passed as exact" in check_lines(guesses)[-1]
    assert any("semantic.oracle_max" in line for line in check_lines(guesses))


@pytest.mark.parametrize(
    ("name", "caught_by"),
    [
        ("IgnoresSeed", "two seeds differ"),
        ("GlobalRandom", "the same process image, again"),
        ("SetOrder", "another hash seed"),
        ("ReadsClock", "slower, at another time"),
        ("PrintsAddress", "another hash seed"),
        ("ReadsFolder", "another folder, locale and time zone"),
    ],
)
def test_an_environment_that_does_not_repeat_itself_is_caught(name: str, caught_by: str) -> None:
    found = check_environment(f"{MODULE}:{name}", task={}, actions=["a", "b"], episodes=2)
    assert (found.passed, found.replay) == (False, "none")
    assert caught_by in [check.name for check in found.checks if check.passed is False], check_lines(found)
    expected = "no run should train with it" if name == "IgnoresSeed" else "no run can verify it"
    assert expected in check_lines(found)[-1]


def test_an_environment_that_pays_for_nothing_is_caught() -> None:
    assert "empty and meaningless answers earn the least" in failed(f"{MODULE}:PaysForNothing", solution=["good"])


def test_an_environment_that_fails_is_caught() -> None:
    assert "answers every turn" in failed("tasks.environments.own_environments:Raises")
