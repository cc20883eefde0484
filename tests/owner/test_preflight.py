"""What `--dry-run` foresees."""

from pathlib import Path
from typing import Any

import pytest

from shoal.config import ShoalConfig, build_config
from shoal.host.demo import demo_config
from shoal.owner.preflight import foreseen_problems


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)


def test_nothing_is_wrong_with_the_demo() -> None:
    assert foreseen_problems(demo_config()) == []


SOUND: dict[str, Any] = {
    "rollouts": {"max_new_tokens": 48, "max_prompt_tokens": 64},
    "trust": {"stake_tokens": 60_000},
}


def problems_of(**sections: dict[str, Any]) -> list[str]:
    tree = {name: SOUND.get(name, {}) | sections.get(name, {}) for name in {*SOUND, *sections}}
    return foreseen_problems(build_config(tree))


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"coordinator": {"host": "0.0.0.0"}}, "coordinator.host = 0.0.0.0 says where to listen"),
        ({"broadcast": {"public_url": "http://run.example.org:7301"}}, "is an example; name your own machine"),
        ({"trust": {"stake_tokens": 1}}, "cheating would pay"),
        ({"validation": {"calibration": "nowhere.json"}}, "There is no calibration nowhere.json"),
        ({"model": {"path": "Qwen/QwQ-32B"}}, "The bundled calibration was not measured on Qwen/QwQ-32B"),
        ({"model": {"path": "Qwen/QwQ-32B"}}, "the demo's sums"),
        ({"tasks": {"source": "nowhere.jsonl"}}, "There are no tasks at nowhere.jsonl"),
        ({"validation": {"reward_models": {"polite": "nowhere"}}}, "There is no reward model polite at nowhere"),
        ({"training": {"micro_batch_tokens": 100}}, "cannot hold a sample of 112 tokens"),
        ({"coordinator": {"max_upload_bytes": 1000}}, "coordinator.max_upload_bytes may refuse"),
        ({"training": {"trackers": ["wandb"]}}, "nobody is logged in here"),
        ({"coordinator": {"bucket": "https://s3.mine.io/rollouts"}}, "AWS_ACCESS_KEY_ID is not"),
    ],
)
def test_what_cannot_work_is_one_sentence(sections: dict[str, dict[str, Any]], sentence: str) -> None:
    assert [problem for problem in problems_of(**sections) if sentence in problem]
    assert not [problem for problem in problems_of() if sentence in problem]


def test_an_engine_that_is_not_installed_is_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [problem for problem in problems_of(validation={"engine": "vllm"}) if "not installed" in problem]


@pytest.mark.parametrize("setting", [("WANDB_MODE", "offline"), ("WANDB_API_KEY", "k")])
def test_an_account_or_an_offline_mode_is_enough(monkeypatch: pytest.MonkeyPatch, setting: tuple[str, str]) -> None:
    monkeypatch.setenv(*setting)
    assert problems_of(training={"trackers": ["wandb"]}) == []


def test_a_login_in_the_home_directory_counts(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password k\n")
    assert problems_of(training={"trackers": ["wandb"]}) == []


def test_the_default_settings_say_what_they_lack() -> None:
    assert all(sentence.endswith(".") for sentence in foreseen_problems(ShoalConfig()))
