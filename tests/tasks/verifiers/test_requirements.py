"""A role that joins learns at once what its machine lacks to score the run's tasks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.config import RewardConfig
from shoal.errors import ConfigError
from shoal.tasks import OwnVerifierError, SandboxError, Task, TaskSet, check_requirements
from shoal.tasks.sandbox.sandbox import sandbox_complaint

TESTS = {"test_cases": {"inputs": ["1"], "outputs": ["1"]}}
OWN = "tasks.own:says_one"


@pytest.fixture
def _no_bubblewrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox_complaint.cache_clear()
    yield
    sandbox_complaint.cache_clear()


def tasks(task_type: str, info: dict[str, Any] | None = None) -> TaskSet:
    plain = Task(problem_id="1", source="s", task_type="format", prompt="?", verification_info={})
    return TaskSet([plain, plain.model_copy(update={"task_type": task_type, "verification_info": info or {}})])


@pytest.mark.usefixtures("_no_bubblewrap")
@pytest.mark.parametrize(
    ("task_type", "info"),
    [
        ("verifiable_code", TESTS),
        ("prime_rl_code", TESTS),
        ("multi", {"parts": [{"task_type": "verifiable_code", "verification_info": TESTS}]}),
    ],
)
def test_code_tasks_need_a_sandbox_wherever_they_hide(task_type: str, info: dict[str, Any]) -> None:
    with pytest.raises(SandboxError, match=r"bubblewrap is not installed\. Install bubblewrap"):
        check_requirements(tasks(task_type, info), RewardConfig())


@pytest.mark.usefixtures("_no_bubblewrap")
def test_a_part_of_the_reward_may_need_a_sandbox_too() -> None:
    check_requirements(tasks("format"), RewardConfig())
    with pytest.raises(SandboxError):
        check_requirements(tasks("format"), RewardConfig(parts={"task": 0.5, "verifiable_code": 0.5}))


def test_code_of_the_owner_is_imported_only_where_it_was_allowed() -> None:
    check_requirements(tasks(OWN), RewardConfig())
    check_requirements(tasks(OWN), RewardConfig(), own_verifiers=(OWN,))
    with pytest.raises(OwnVerifierError, match=f"--verifier {OWN}"):
        check_requirements(tasks(OWN), RewardConfig(), own_verifiers=())


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"shoal\[reasoning-gym\]"):
        check_requirements(tasks("reasoning_gym", {"dataset": "d", "entry": {}}), RewardConfig())
