"""The run in one process: lags as asked, filters as the run does, and depends on its seed alone."""

from pathlib import Path

from shoal.config import ShoalConfig, build_config
from support.local_run import LocalRun


def tiny_run() -> ShoalConfig:
    return build_config(
        {
            "tasks": {"count": 50, "heldout": 16},
            "rollouts": {"group_size": 4, "max_new_tokens": 24},
            "training": {"groups_per_step": 2, "learning_rate": 1e-3, "kl_beta": 0.0, "device": "cpu", "kl_limit": 1e6},
        }
    )


def test_groups_come_from_the_version_that_the_lag_allows(tmp_path: Path) -> None:
    local = LocalRun(tiny_run(), 0, tmp_path)
    ages = [report.age_histogram for report in (local.step(1) for _ in range(3)) if report is not None]
    assert all(set(histogram) <= {0, 1} for histogram in ages)
    assert set(ages[-1]) == {1}


def test_every_trained_group_has_a_signal_and_the_batch_is_bounded(tmp_path: Path) -> None:
    groups = LocalRun(tiny_run(), 0, tmp_path).useful_groups(0)
    assert len(groups) <= 2
    assert all(len({sample.task_reward for sample in group.samples}) > 1 for group in groups)


def test_same_seed_same_curve(tmp_path: Path) -> None:
    def final(directory: Path) -> list[bytes]:
        local = LocalRun(tiny_run(), 7, directory)
        local.step(0)
        assert 0.0 <= local.heldout_reward(8) <= 1.0
        return [bytes(tensor.data) for tensor in local.trainer.wire_tensors()]

    assert final(tmp_path / "a") == final(tmp_path / "b")
