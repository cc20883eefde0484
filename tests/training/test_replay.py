"""Recorded rollouts train like live ones: in the order of the run, useful groups only, resumable."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.config import TrainingConfig
from shoal.protocol.rollouts import Rollout, RolloutHeader, RolloutLimits, write_rollouts
from shoal.training import Group, Trainer
from shoal.training.replay import ReplayError, recorded_groups, replay

LIMITS = RolloutLimits(rows=64, prompt_tokens=16, output_tokens=16, proof_bytes=0)


def record(directory: Path, step: int, slot: int, rewards: list[list[float]]) -> None:
    header = RolloutHeader(
        run_id="r", step=step, slot=slot, lease_id="l", worker_key="k", policy_version=step, manifest_digest="d",
        numerics_class="torch/float32/cpu",
    )  # fmt: skip
    rows = [
        Rollout(
            "t", group, sample, [1, 2], [3 + sample, 4, step % 5], [3], [-1.0] * 3, 0, reward, 0.0, reward, "stop", []
        )
        for group, values in enumerate(rewards)
        for sample, reward in enumerate(values)
    ]
    (directory / f"{9 - step}-{slot}.parquet").write_bytes(write_rollouts(header, rows))


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    directory = tmp_path / "rollouts"
    directory.mkdir()
    for step in range(3):
        record(directory, step, 1, [[0.0, 1.0], [1.0, 1.0]])
        record(directory, step, 0, [[1.0, 0.0]])
    return directory


def make_trainer(model_dir: Path, work_dir: Path) -> Trainer:
    config = TrainingConfig(groups_per_step=2, kl_beta=0.0, learning_rate=1e-3, device="cpu")
    return Trainer(config, model_dir, work_dir=work_dir, temperature=1.0, seed=0)


def weights(trainer: Trainer) -> list[bytes]:
    return [bytes(tensor.data) for tensor in trainer.wire_tensors()]


def test_groups_come_in_the_order_of_the_run(recording: Path) -> None:
    names = [group.group_id for group in recorded_groups(recording, LIMITS)]
    assert names == [f"{step}/{place}" for step in range(3) for place in ("0/0", "1/0", "1/1")]


def test_completions_can_be_scored_again(recording: Path) -> None:
    groups = recorded_groups(recording, LIMITS, score=lambda rollout: (0.25, rollout.sample * 1.0))
    rewards = [(sample.task_reward, sample.reward) for sample in next(groups).samples]
    assert rewards == [(0.25, 0.0), (0.25, 1.0)]


def test_replay_trains_useful_groups_and_resumes_where_it_was(recording: Path, model_dir: Path, tmp_path: Path) -> None:
    def groups() -> Iterator[Group]:
        return recorded_groups(recording, LIMITS)

    straight = make_trainer(model_dir, tmp_path / "straight")
    sizes: list[int] = []
    assert replay(straight, groups(), steps=9, on_step=lambda report: sizes.append(report.groups)) == 3
    assert sizes == [2, 2, 2]
    first = make_trainer(model_dir, tmp_path / "resumed")
    assert replay(first, groups(), steps=1) == 1
    second = make_trainer(model_dir, tmp_path / "resumed")
    assert second.resume()
    assert replay(second, groups(), steps=9) == 2
    assert weights(second) == weights(straight)


def test_empty_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="no rollout files"):
        next(recorded_groups(tmp_path, LIMITS))


def test_the_command_trains_from_a_recording_and_goes_on_where_it_was(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(steps: int) -> str:
        settings = {
            "run.dir": tmp_path / "run",
            "run.steps": steps,
            "training.groups_per_step": 2,
            "training.kl_beta": 0,
        }
        flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        with pytest.raises(SystemExit) as ended:
            main(["train", "--replay", str(recording), *flags])
        assert ended.value.code == 0
        return capsys.readouterr().out

    assert "trained 2 steps" in train(2)
    assert "resumed at step 2" in (out := train(9))
    assert "trained 1 steps" in out
    records = [json.loads(line) for line in (tmp_path / "run" / "replay" / "steps.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2]
