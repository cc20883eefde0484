"""The SmolLM2 example without its model: tasks, settings, and what it calls a failure."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.config import TasksConfig, load_config
from shoal.tasks import Task, load_tasks, score
from shoal.training.export import RunFacts, model_card
from shoal.validation.calibration.limits import load_calibration

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "smollm2"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tasks.py", str(out), "--count", "600", "--test", "80"])
        runpy.run_path(str(EXAMPLE / "tasks.py"), run_name="__main__")
    return out


def questions(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def asked(task: dict[str, Any]) -> tuple[str, list[int]]:
    kind, *numbers = task["problem_id"].split("-")
    return kind, sorted(map(int, numbers))


def test_no_question_of_the_test_is_trained_on_in_any_order(tasks: Path) -> None:
    train, test = questions(tasks / "train.jsonl"), questions(tasks / "test.jsonl")
    assert (len(train), len(test)) == (600, 80)
    keys = [str(asked(task)) for task in train + test]
    assert len(set(keys)) == len(keys)


def test_answers_are_the_largest_or_smallest_of_the_numbers_in_the_question(tasks: Path) -> None:
    for fields in questions(tasks / "test.jsonl"):
        kind, numbers = asked(fields)
        expected = max(numbers) if kind == "max" else min(numbers)
        words = ("largest", "larger") if kind == "max" else ("smallest", "smaller")
        assert any(word in fields["prompt"] for word in words)
        assert all(str(number) in fields["prompt"] for number in numbers)
        task = Task(source="test", **fields)
        assert score(task, f"</think>The answer is {expected}.").reward == 1.0
        assert score(task, f"</think>{sum(numbers)}").reward == 0.0


def test_the_run_trains_on_them(tasks: Path) -> None:
    loaded = load_tasks(TasksConfig(source=str(tasks / "train.jsonl"), heldout=60))
    assert (len(loaded.train), len(loaded.heldout)) == (540, 60)


def test_every_submission_is_audited_against_a_calibration_of_this_model() -> None:
    config = load_config(EXAMPLE / "run.toml", [])
    assert config.trust.audit_floor == 1.0
    assert not config.tasks.thinking
    calibration = load_calibration(str(ROOT / config.validation.calibration))
    assert calibration.model == config.model.path
    assert set(config.validation.numerics_classes) <= set(calibration.classes)


GOOD = {
    "steps": 3,
    "steps_planned": 3,
    "policy_version": 3,
    "submissions": 9,
    "submissions_audited": 9,
    "submissions_rejected": 0,
    "ledger_ok": True,
    "difference": 0.2,
}


@pytest.mark.parametrize(
    ("change", "smoke", "complaint"),
    [
        ({}, False, ""),
        ({"difference": 0.1}, False, "rose by 0.100"),
        ({"difference": 0.1}, True, ""),
        ({"steps": 2}, True, "only 2 steps"),
        ({"policy_version": 2}, True, "version 2 was compared, the run ends with 3"),
        ({"submissions_audited": 7}, True, "2 submissions were not audited"),
        ({"submissions_rejected": 1}, True, "1 honest submissions"),
        ({"ledger_ok": False}, True, "ledger"),
    ],
)
def test_a_broken_promise_is_reported(change: dict[str, Any], smoke: bool, complaint: str) -> None:
    failures = runpy.run_path(str(EXAMPLE / "run.py"))["failures"]
    found = failures(GOOD | change, smoke=smoke)
    assert len(found) == bool(complaint)
    assert complaint in " ".join(found)


def test_the_compared_version_is_read_from_the_card(tmp_path: Path) -> None:
    facts = RunFacts(run_name="r", base_model="bundled", version=42, last_version=42)
    (tmp_path / "README.md").write_text(model_card(facts))
    assert runpy.run_path(str(EXAMPLE / "run.py"))["exported_version"](tmp_path) == 42


def test_asking_how_to_fetch_the_model_fetches_nothing(tmp_path: Path) -> None:
    """It made a directory with the name of the flag and downloaded the model into it."""
    asked = subprocess.run(
        [sys.executable, str(EXAMPLE / "fetch.py"), "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (asked.returncode, list(tmp_path.iterdir())) == (0, [])
    assert "DIRECTORY" in asked.stdout
