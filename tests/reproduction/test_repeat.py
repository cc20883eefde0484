"""A run of real processes, repeated from what it left: bit for bit, from an export, and located where one byte was changed."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from end_to_end.swarm import small_config, swarm
from shoal.config import to_toml
from shoal.errors import ConfigError, ShoalError
from shoal.host.outcome import save_ledger
from shoal.owner.records import export_run
from shoal.owner.reproduce import parse_steps, reproduce_run
from shoal.roles.process import use_threads
from shoal.rundir import RunDirectory
from support.tiny_run import Reports

STEPS = 3


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps with an honest worker and one that lies about rewards."""
    root = tmp_path_factory.mktemp("finished") / "run"
    config = small_config(root, steps=STEPS, training={"checkpoint_every": 1, "keep_checkpoints": 8})
    with swarm(config) as run:
        run.add_owner_roles("coordinator", "trainer", "relay-1", "validator")
        run.add_worker("cheater-rewards", "rewards")
        run.add_worker("honest-1")
        run.until("the last version", lambda status: status.newest_version == STEPS)
        save_ledger(run.directory, config.coordinator.url_here)
    return root


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy that a test may damage."""
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    yield tmp_path / "run"
    shutil.rmtree(tmp_path / "run")


def reproduced(where: Path, **options: Any) -> tuple[bool, str, str]:
    """Whether it came out, the page, and what was said."""
    said = Reports()
    chosen = {
        "steps": None,
        "sample": 4,
        "model": None,
        "run_key": None,
        "threads": 0,
        "use_threads": use_threads,
    } | options
    done = reproduce_run(str(where), None, said, **chosen)
    return done, (where / "reproduction.md").read_text(), "\n".join(said)


def trained_file(run: Path, step: int) -> Path:
    """A rollout file that only a later batch holds, by the ledger's own words."""
    from shoal.reproduction import read_evidence

    evidence = read_evidence(run)
    earlier = {group.file.digest for one in range(step) for group in evidence.history.steps[one].groups}
    found = [group.file.digest for group in evidence.history.steps[step].groups if group.file.digest not in earlier]
    return evidence.files[found[0]]


@pytest.mark.slow
def test_every_step_comes_out_bit_for_bit_and_verdicts_agree(run: Path) -> None:
    done, page, said = reproduced(run)
    assert done, said
    assert f"reproduced: {STEPS} training steps bit-identical, 4 verdicts repeated" in page
    assert page.count("| bit-identical |") == STEPS + 1
    assert "step 2: identical" in said


@pytest.mark.slow
def test_one_changed_byte_of_a_rollout_names_the_step_that_used_it(run: Path) -> None:
    path = trained_file(run, step=1)
    flip(path)
    done, page, said = reproduced(run, sample=0)
    assert not done
    assert "not reproduced: step 1: The rollout file of step " in page
    assert "step 0: identical" in said
    assert f"{path.name} has a digest that is in no verdict" in page


@pytest.mark.slow
def test_a_missing_file_and_a_changed_setting_are_located(run: Path) -> None:
    trained_file(run, step=2).unlink()
    done, page, _ = reproduced(run, sample=0)
    assert not done
    assert "not reproduced: step 2: " in page
    config = RunDirectory(run).config()
    training = config.training.model_copy(update={"learning_rate": 2 * config.training.learning_rate})
    (run / "run.toml").write_text(to_toml(config.model_copy(update={"training": training})))
    shutil.rmtree(run / "trainer" / "checkpoints")
    done, page, _ = reproduced(run, sample=0)
    assert not done
    assert "not reproduced: step 0: its files are the recorded ones, so settings, software or machine differ" in page


@pytest.mark.slow
def test_a_changed_ledger_or_descriptor_is_refused_with_its_entry(run: Path) -> None:
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    lines[7] = lines[7].replace(b"0", b"1", 1)
    (run / "ledger.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(ShoalError, match=r"ledger does not hold: entry 7"):
        reproduced(run)
    descriptor = run / "descriptor.json"
    descriptor.write_bytes(descriptor.read_bytes().replace(b"small", b"smell", 1))
    with pytest.raises(ShoalError, match="signature"):
        reproduced(run)


def flip(path: Path, at: int | None = None) -> None:
    """Changes one byte."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(bytes(data))


def entry_of(run: Path, kind: str) -> int:
    """The number of the last ledger entry of this kind."""
    lines = (run / "ledger.jsonl").read_bytes().splitlines()
    return max(number for number, line in enumerate(lines) if f'"kind": "{kind}"'.encode() in line)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["verdict", "recorded", "version"])
def test_one_byte_of_a_verdict_a_secret_or_a_version_in_the_ledger_is_located(run: Path, kind: str) -> None:
    """A verdict names its file and reasons, a recorded batch its secret, a version its weights."""
    number = entry_of(run, kind)
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    field = {"verdict": b"worker", "recorded": b"step_secret", "version": b"weights"}[kind]
    body = bytearray(lines[number])
    at = body.index(field) + len(field) + 12
    body[at] = ord("0") if body[at] != ord("0") else ord("1")
    lines[number] = bytes(body)
    (run / "ledger.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(ShoalError, match=rf"ledger does not hold: entry {number}\b"):
        reproduced(run)


@pytest.mark.slow
def test_one_byte_of_any_copy_beside_the_ledger_is_located_although_training_needs_none(run: Path) -> None:
    shard, manifest = (max((run / "origin" / folder).iterdir()) for folder in ("shards", "manifests"))
    flip(shard)
    flip(manifest)
    (weights,) = (run / "trainer" / "checkpoints" / "step-00000002").glob("*.distcp")
    os.truncate(weights, weights.stat().st_size - 1)  # behind all that is compared with the ledger
    flip(run / "trainer" / "machine.json", at=0)
    done, page, said = reproduced(run, steps=[0], sample=0, threads=1)
    assert not done
    assert f"origin/shards/{shard.name} was changed: its name is the digest that it had" in page
    assert f"origin/manifests/{manifest.name} was changed" in page
    assert "the checkpoint of version 2 was damaged and cannot be read" in page
    assert "trainer/machine.json cannot be read" in page
    assert "step 0: identical" in said


@pytest.mark.slow
def test_a_single_step_begins_at_the_checkpoint_before_it_and_says_what_it_took_on_trust(run: Path) -> None:
    done, page, _ = reproduced(run, steps=[2], sample=2)
    assert done
    assert "the checkpoint of version 2" in page
    assert "optimiser's state in the checkpoint" in page
    with pytest.raises(ShoalError, match=r"Step 9 is not recorded .*Recorded are 0 to 2"):
        reproduced(run, steps=[9])


@pytest.mark.slow
def test_an_export_has_everything_that_others_need(run: Path, tmp_path: Path) -> None:
    import datasets

    out = tmp_path / "export"
    export_run(RunDirectory(run), out, Reports())
    done, page, said = reproduced(out)
    assert done, said
    assert "bit-identical" in page
    card = (out / "README.md").read_text()
    assert "shoal reproduce . --run-key " in card
    loaded = datasets.load_dataset(
        "parquet", data_files=str(out / "rollouts" / "*.parquet"), cache_dir=str(tmp_path / "cache")
    )["train"]
    row = loaded[0]
    assert {"messages", "mask", "reward", "verdict", "version"} <= set(loaded.column_names)
    assert len(row["mask"]) == len(row["tokens"]) == len(row["logprobs"])
    assert sum(row["mask"]) > 0
    assert row["messages"][-1]["role"] == "assistant"
    assert {"accepted", "rejected"} >= set(loaded["verdict"]) - {"none"}
    (weights,) = out.glob("*.safetensors")
    flip(weights, at=-1)
    done, page, _ = reproduced(out, steps=[0], sample=0)
    assert not done
    assert "the exported policy is not one that the ledger records" in page


def test_steps_are_numbers_and_ranges() -> None:
    assert parse_steps("all") is None
    assert parse_steps("3") == [3]
    assert parse_steps("0-2,7") == [0, 1, 2, 7]
    for text in ("", "x", "5-3", "-1"):
        with pytest.raises(ConfigError, match="names no steps"):
            parse_steps(text)
