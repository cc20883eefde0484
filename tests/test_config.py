from pathlib import Path

import pytest

from shoal.config import ShoalConfig, all_keys, all_settings, build_config, changes, load_config, to_toml
from shoal.errors import ConfigError


def run_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_a_file_sets_and_flags_override(tmp_path: Path) -> None:
    path = run_file(tmp_path, '[run]\nname = "sums"\n[training]\nlearning_rate = 1e-3\nasync_level = 4\n')
    flags = ["--training.learning_rate", "3e-4", "--run.steps=50", "--reward.target_lengths", "[8, 16]"]
    config = load_config(path, flags)
    assert (config.run.name, config.training.async_level) == ("sums", 4)
    assert (config.training.learning_rate, config.run.steps) == (3e-4, 50)
    assert config.reward.target_lengths == (8, 16)


def test_without_a_file_there_are_defaults() -> None:
    assert load_config(None) == ShoalConfig()


def test_text_needs_no_quotes_on_the_command_line() -> None:
    config = load_config(None, ["--model.path", "./my model", "--run.name", "demo", "--tasks.system_prompt="])
    assert (config.model.path, config.run.name, config.tasks.system_prompt) == ("./my model", "demo", "")


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (["--training.learning_rat", "1"], "--training.learning_rate"),
        (["--learning_rate", "1"], "--training.learning_rate"),
        (["--trainning.epochs", "1"], "--training.epochs"),
    ],
)
def test_a_wrong_flag_is_answered_with_the_nearest_right_one(flags: list[str], hint: str) -> None:
    with pytest.raises(ConfigError, match="Unknown setting") as caught:
        load_config(None, flags)
    assert caught.value.hint == f"Did you mean {hint}?"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[training]\nlearning_rte = 1\n", "training.learning_rate"),
        ("[trainer]\nepochs = 1\n", "training"),
        ("[coordinator]\nlease = 1\n", "coordinator.lease_s"),
    ],
)
def test_a_wrong_key_is_answered_with_the_nearest_right_one(tmp_path: Path, text: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="Unknown setting") as caught:
        load_config(run_file(tmp_path, text))
    assert caught.value.hint == f"Did you mean {hint}?"


def test_a_key_like_no_other_points_to_the_list() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["--qqqq", "1"])
    assert "shoal config" in caught.value.hint


@pytest.mark.parametrize(
    "flags",
    [
        ["--training.async_level", "17"],
        ["--training.async_level", "-1"],
        ["--training.learning_rate", "0"],
        ["--training.learning_rate", "fast"],
        ["--rollouts.group_size", "1"],
        ["--rollouts.temperature", "0"],
        ["--trust.audit_floor", "1.5"],
        ["--run.name", "../escape"],
        ["--run.steps", "0"],
        ["--coordinator.port", "70000"],
        ["--training.device", "abacus"],
    ],
)
def test_a_wrong_value_is_named_with_its_setting(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"Setting {flags[0][2:]} = .* is wrong") as caught:
        load_config(None, flags)
    assert "shoal config" in caught.value.hint


@pytest.mark.parametrize(("flags", "why"), [(["--run.steps"], "needs a value"), (["run.steps"], "Unexpected argument")])
def test_half_a_flag_is_refused(flags: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(None, flags)


@pytest.mark.parametrize(
    ("content", "why"), [(b"[run\n", "not valid TOML"), (b"\xff\xfe", "not valid TOML"), (b"run = 5\n", "Setting run")]
)
def test_a_malformed_file_is_one_sentence(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        load_config(path)


def test_a_missing_or_unreadable_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no run file"):
        load_config(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)


def test_a_flag_into_something_that_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a table"):
        load_config(run_file(tmp_path, "run = 5\n"), ["--run.steps", "3"])


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    config = build_config(
        {
            "run": {"name": "a.b-c", "dir": "runs/some where", "seed": 12},
            "tasks": {"system_prompt": 'Say "yes",\nor\tno \\ perhaps'},
            "reward": {"target_lengths": [4, 8]},
            "training": {"trackers": ["wandb"]},
        }
    )
    assert load_config(run_file(tmp_path, to_toml(config))) == config


def test_every_setting_has_its_reason() -> None:
    assert [setting.key for setting in all_settings() if not setting.reason.strip()] == []


def test_there_are_few_settings() -> None:
    assert len(all_keys()) <= 91, "make a constant of one that no run file sets"


def test_the_schema_knows_what_a_run_keeps() -> None:
    kept = {setting.key for setting in all_settings() if setting.fixed}
    assert {"run.name", "run.seed", "model.path", "tasks.source", "rollouts.group_size"} <= kept
    assert {"reward.length_alpha", "training.async_level", "coordinator.store"} <= kept
    assert not kept & {"run.steps", "run.dir", "training.learning_rate", "coordinator.public_url", "trust.stake_tokens"}


def test_what_changed_between_two_starts_is_said_with_both_values() -> None:
    old = build_config({"training": {"learning_rate": 1e-4}, "reward": {"target_lengths": [8]}})
    new = build_config({"training": {"learning_rate": 2e-4}, "reward": {"target_lengths": [8, 16]}})
    assert [str(change) for change in changes(old, new)] == [
        "reward.target_lengths was [8] and is now [8, 16]",
        "training.learning_rate was 0.0001 and is now 0.0002",
    ]
    assert changes(old, old) == []


def test_addresses_follow_from_host_and_port_unless_they_are_given() -> None:
    config = build_config({"coordinator": {"host": "0.0.0.0", "port": 1}, "broadcast": {"public_url": "https://cdn"}})
    assert (config.coordinator_url, config.origin_url) == ("http://0.0.0.0:1", "https://cdn")


def test_settings_cannot_change_once_made() -> None:
    with pytest.raises(ValueError, match="frozen"):
        ShoalConfig().run.steps = 5


def test_strange_letters_survive_being_written_and_read(tmp_path: Path) -> None:
    config = build_config({"tasks": {"system_prompt": 'a "quoted" 🐟 \x7f \\ line\nbreak'}})
    assert load_config(run_file(tmp_path, to_toml(config))) == config
