import json

import pytest

from shoal.cli.environments import check
from shoal.errors import ConfigError


def test_a_check_says_which_class_was_passed_and_ends_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        check("guess-number", episodes=2, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert left.value.code == 0, found
    assert (found["passed"], found["replay"]) == (True, "exact")
    assert "runtime.seed_control" in {one["other_name"] for one in found["checks"]}


def test_an_environment_that_fails_its_check_ends_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        check("tasks.environments.unrepeatable:GlobalRandom", episodes=2)
    assert left.value.code == 1
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", "[1]", "7"])
def test_a_task_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no JSON object"):
        check("guess-number", task=text)
