"""What a contributor reads before anything is downloaded or run."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.broadcast.client import Preview
from shoal.config import RewardConfig
from shoal.errors import UnavailableError
from shoal.roles import welcome
from shoal.tasks import Task, TaskSet
from support.samples import descriptor
from support.tiny_run import Reports


class Weights:
    def __init__(self, answer: Preview | Exception | None) -> None:
        self.answer = answer

    def preview(self) -> Preview | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def held_bytes(self) -> int:
        return 500_000


def reported(answer: Preview | Exception | None, folder: Path) -> Reports:
    reports = Reports()
    welcome.explain_weights(Weights(answer), 4, folder, reports)  # type: ignore[arg-type]
    return reports


def test_a_contributor_reads_what_will_be_fetched_and_run() -> None:
    reports = Reports()
    welcome.explain_run(descriptor(), reports)
    assert reports.some("run run-1")
    assert reports.some("will fetch 1 model file and the tasks")
    assert reports.some("only outbound HTTP is used")


def test_the_size_of_the_policy_is_reported_with_the_disk_it_needs(tmp_path: Path) -> None:
    (line,) = reported(Preview(7, 1_500_000, 2_000_000, 2_100_000), tmp_path)
    assert line.startswith(
        "policy: version 7, 1.5 MB to fetch; 4 versions and what is put together beside them will take up to 10.1 MB"
    )
    assert f" in {tmp_path}, where " in line


def test_the_copy_that_is_put_together_counts_as_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four versions fit, but not while the fifth is made."""
    usage = SimpleNamespace(free=9_000_000)
    monkeypatch.setattr("shoal.roles.welcome.shutil.disk_usage", lambda folder: usage)
    preview = Preview(7, 1_500_000, 2_000_000, 2_000_000)
    assert reported(preview, tmp_path)[-1] == "that will not fit: choose a larger disk with --dir"
    usage.free = 9_500_000
    assert len(reported(preview, tmp_path)) == 1


def test_a_policy_that_does_not_fit_is_reported_before_it_is_fetched(tmp_path: Path) -> None:
    assert (
        reported(Preview(7, 1 << 60, 1 << 60, 1 << 60), tmp_path)[-1]
        == "that will not fit: choose a larger disk with --dir"
    )


def test_a_policy_that_is_not_there_yet_stops_nobody(tmp_path: Path) -> None:
    assert reported(None, tmp_path) == ["no version of the policy is published yet"]
    assert reported(UnavailableError("No relay answers."), tmp_path).some("not known yet: No relay answers.")


def test_every_figure_of_the_model_is_shown_only_if_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 64}))
    assert welcome.describe_model(tmp_path / "config.json") == "LlamaForCausalLM, 64 hidden"


def task(kind: str) -> Task:
    info = {"answer": "1"} if kind == "verifiable_math" else {"tests": [{"input": "", "output": "1"}]}
    return Task(problem_id=kind, source="s", task_type=kind, prompt="?", verification_info=info)


def test_a_contributor_reads_that_programs_of_the_model_will_run() -> None:
    assert welcome.describe_scoring(TaskSet([task("verifiable_math")]), RewardConfig()) == "verifiable_math"
    words = welcome.describe_scoring(TaskSet([task("verifiable_math"), task("verifiable_code")]), RewardConfig())
    assert (
        words
        == "verifiable_code, verifiable_math; programs that the model writes are run here, in a sandbox without network"
    )
