"""Rollouts as a dataset that `datasets` loads, and evidence laid out like a run directory."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest

from inspection.recorded import make_run
from shoal.config import build_config, to_toml
from shoal.inspection import open_recording
from shoal.owner import dataset
from shoal.owner.dataset import over_row, public_settings, write_dataset, write_evidence
from shoal.policy import bundled_directory
from shoal.protocol.rollouts import RolloutLimits, read_rollouts, write_rollouts
from shoal.rundir import RunDirectory
from support.samples import rollout
from support.tiny_run import Reports


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(bundled_directory(), tmp_path_factory.mktemp("run") / "run")


def load(folder: Path, cache: Path) -> datasets.Dataset:
    return datasets.load_dataset("parquet", data_files=str(folder / "*.parquet"), cache_dir=str(cache))["train"]


def test_a_dataset_has_messages_mask_reward_verdict_and_version(run: RunDirectory, tmp_path: Path) -> None:
    rows = write_dataset(run, tmp_path / "rollouts", Reports())
    loaded = load(tmp_path / "rollouts", tmp_path / "cache")
    assert len(loaded) == rows == 8
    assert set(loaded["verdict"]) == {"accepted", "rejected"}
    for row in loaded:
        assert row["messages"][-1]["role"] == "assistant"
        assert row["messages"][-2]["role"] == "user"
        assert len(row["mask"]) == len(row["tokens"]) == len(row["logprobs"])
        assert row["mask"] == sorted(row["mask"]), "the prompt comes first"
        assert 0 < sum(row["mask"]) <= 6
        assert row["version"] == 1


def test_the_mask_of_an_episode_leaves_out_what_the_environment_gave() -> None:
    row = replace(rollout(tokens=6), segment_lengths=[2, 3, 1], output_logprobs=[-1.0, -2.0, -3.0])
    before = [0] * len(row.input_tokens)
    assert over_row(row, 0, [1] * row.sampled_count) == [*before, 1, 1, 0, 0, 0, 1]
    assert over_row(row, 0.0, row.output_logprobs)[len(before) :] == [-1.0, -2.0, 0.0, 0.0, 0.0, -3.0]


def test_an_episode_comes_back_as_a_conversation_with_its_mask(run: RunDirectory, tmp_path: Path) -> None:
    plain = next(iter(open_recording([run.root]).records()))
    row = replace(rollout(tokens=6), segment_lengths=[2, 3, 1], output_logprobs=[-1.0, -2.0, -3.0])
    episode = replace(plain, rollout=row, prompt="open the door", segments=("<push>", "it is locked", "<knock>"))
    dataset._write_table(tmp_path / "train.parquet", [dataset._row(episode, None), dataset._row(plain, None)])
    first, second = load(tmp_path, tmp_path / "cache")
    assert first["messages"] == [
        {"role": "user", "content": "open the door"},
        {"role": "assistant", "content": "<push>"},
        {"role": "tool", "content": "it is locked"},
        {"role": "assistant", "content": "<knock>"},
    ]
    assert first["mask"][-6:] == [1, 1, 0, 0, 0, 1]
    assert first["logprobs"][-6:] == [-1.0, -2.0, 0.0, 0.0, 0.0, -3.0]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant"]


@pytest.mark.parametrize(
    "lie",
    [
        {"output_tokens": [-1, 2**31 - 1, -(2**31)], "segment_lengths": [3], "output_logprobs": [math.nan]},
        {"output_logprobs": []},
        {"reward": math.inf, "task_reward": math.nan, "finish_reason": "\x1b[31m"},
        {"task_id": "<script>", "target_length": 2**31 - 1},
    ],
)
def test_what_a_cheater_wrote_spoils_no_dataset(lie: dict[str, Any], tmp_path: Path) -> None:
    run = make_run(bundled_directory(), tmp_path / "run")
    hostile = run.submissions / "cheat-file.parquet"
    header, rows = read_rollouts(hostile.read_bytes(), RolloutLimits.of(run.descriptor()))
    hostile.write_bytes(write_rollouts(header, [replace(row, **lie) for row in rows]))
    rows_written = write_dataset(run, tmp_path / "rollouts", Reports())
    loaded = load(tmp_path / "rollouts", tmp_path / "cache")
    assert len(loaded) == rows_written
    assert loaded["verdict"].count("accepted") == 4


def test_a_file_that_cannot_be_read_is_left_out_and_counted(tmp_path: Path) -> None:
    run = make_run(bundled_directory(), tmp_path / "run")
    broken = min(run.submissions.glob("*.parquet"))
    broken.write_bytes(broken.read_bytes()[:40])
    said = Reports()
    assert write_dataset(run, tmp_path / "rollouts", said) == 4
    assert said == ["1 files could not be read and are not in the dataset"]


def test_a_run_without_rollouts_says_so(tmp_path: Path) -> None:
    said = Reports()
    (tmp_path / "run").mkdir()
    assert write_dataset(RunDirectory(tmp_path / "run"), tmp_path / "rollouts", said) == 0
    assert said.some("no rollouts are exported: ")
    assert not (tmp_path / "rollouts").exists()


def test_evidence_is_a_run_directory_without_secrets(run: RunDirectory, tmp_path: Path) -> None:
    assert write_evidence(run, tmp_path / "evidence", b"the ledger\n") == 2
    copy = RunDirectory(tmp_path / "evidence")
    assert copy.descriptor() == run.descriptor()
    assert copy.config().training == run.config().training
    assert copy.ledger_file.read_bytes() == b"the ledger\n"
    assert {path.name for path in copy.submissions.iterdir()} == {
        path.name for path in run.submissions.glob("*.parquet")
    }
    names = {path.name for path in copy.root.rglob("*")}
    assert not {name for name in names if name.endswith((".key", ".secret")) or name == "keys"}


def test_the_password_of_a_database_is_not_published() -> None:
    config = build_config({"coordinator": {"store": "postgresql://me:secret@host/shoal"}})
    assert "secret" not in to_toml(public_settings(config))
