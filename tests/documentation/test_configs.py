"""The run files of configs/ are complete: they load, name tasks, addresses and a calibration, and cheating does not pay."""

import re
from pathlib import Path

import pytest

from shoal.config import ShoalConfig, load_config
from shoal.coordinator.rules.trust import LossRule
from shoal.owner.addresses import check_addresses

CONFIGS = Path(__file__).parents[2] / "configs"
LARGE = ("qwen-7b-8gpu", "intellect2-32b")


def config_of(name: str) -> ShoalConfig:
    return load_config(CONFIGS / f"{name}.toml")


@pytest.mark.parametrize("name", [path.stem for path in CONFIGS.glob("*.toml")])
def test_workers_can_reach_it_and_cheating_does_not_pay(name: str) -> None:
    config = config_of(name)
    check_addresses(config)
    assert LossRule.of(config).holds


@pytest.mark.parametrize("name", LARGE)
def test_a_run_for_servers_names_its_tasks_its_calibration_and_needs_no_account(name: str) -> None:
    config = config_of(name)
    assert config.tasks.source.startswith("hf:")
    assert str(config.validation.calibration) != "bundled"
    assert config.validation.numerics_classes
    assert list(config.training.trackers) == []


@pytest.mark.parametrize("name", LARGE)
def test_a_bin_holds_the_longest_sample_and_an_upload_the_largest_file(name: str) -> None:
    config = config_of(name)
    rollouts = config.rollouts
    assert config.training.micro_batch_tokens >= rollouts.max_prompt_tokens + rollouts.max_new_tokens
    rows = rollouts.group_size * rollouts.tasks_per_slot
    assert config.coordinator.max_upload_bytes >= rows * rollouts.max_new_tokens * 16


@pytest.mark.parametrize("name", LARGE)
def test_its_torchrun_line_works_on_as_many_nodes_as_it_names(name: str) -> None:
    text = re.sub(r"\\\n#", " ", (CONFIGS / f"{name}.toml").read_text())
    (line,) = re.findall(r"torchrun .*", text)
    several = "--nnodes" in line
    assert "--standalone" in line or ("--rdzv-backend=c10d" in line and "--rdzv-id=" in line)
    assert several == ("--rdzv-endpoint=" in line)
    assert line.endswith(f"shoal train configs/{name}.toml")
