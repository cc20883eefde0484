"""Checkpoints are whole or absent, also when the process is killed at any file operation."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.config import TrainingConfig
from shoal.files import digest_bytes
from shoal.training import CheckpointError, Checkpoints, Group, Trainer, World
from support.held_writer import HeldWriter

Groups = Callable[..., list[Group]]
STEPS = 3


def make_trainer(model_dir: Path, work_dir: Path, **settings: Any) -> Trainer:
    config = TrainingConfig(learning_rate=1e-3, kl_beta=0.0, device="cpu", **settings)
    return Trainer(config, model_dir, work_dir=work_dir, temperature=1.0, seed=0)


def run_to_the_end(trainer: Trainer, groups: Groups, published: Path) -> None:
    """As the service does: publish, then save, then train; a version is one line of a file."""
    trainer.resume()
    while True:
        digest = digest_bytes(b"".join(bytes(tensor.data) for tensor in trainer.wire_tensors()))
        with published.open("a") as file:
            file.write(json.dumps([trainer.step, digest]) + "\n")
        trainer.save()
        if trainer.step == STEPS:
            trainer.close()
            return
        trainer.train_step(groups(trainer.step, groups=2))


def kill_at_file_operation(number: int, directory: Path) -> None:
    """SIGKILL to this process when it touches the directory for the given time."""
    seen = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"} and str(directory) in str(arguments[0]):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def run_in_child(number: int, model_dir: Path, work_dir: Path, groups: Groups, published: Path) -> bool:
    """Whether the child was killed before it finished."""
    child = os.fork()
    if child == 0:
        kill_at_file_operation(number, work_dir)
        try:
            run_to_the_end(make_trainer(model_dir, work_dir), groups, published)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_run_killed_at_any_moment_resumes_bit_identically(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    truth = tmp_path / "truth"
    run_to_the_end(make_trainer(model_dir, tmp_path / "straight"), groups, truth)
    expected = [json.loads(line) for line in truth.read_text().splitlines()]
    assert len({digest for _, digest in expected}) == STEPS + 1
    kills = 0
    for number in range(1, 400, 7):
        work_dir, published = tmp_path / f"killed-{number}", tmp_path / f"published-{number}"
        if not run_in_child(number, model_dir, work_dir, groups, published):
            break
        kills += 1
        run_to_the_end(make_trainer(model_dir, work_dir), groups, published)
        lines = [json.loads(line) for line in published.read_text().splitlines()]
        assert all(line in expected for line in lines)
        assert lines[-1] == expected[-1]
        assert not list((work_dir / "checkpoints").glob(".tmp-*"))
    assert kills >= 6


def test_only_the_last_checkpoints_stay(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    trainer = make_trainer(model_dir, tmp_path, keep_checkpoints=2)
    for step in range(4):
        trainer.train_step(groups(step, groups=1))
        trainer.save()
    trainer.close()
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-00000003", "step-00000004"]


def test_half_written_checkpoint_is_ignored_and_swept(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    leftover = tmp_path / "checkpoints" / ".tmp-step-00000007"
    leftover.mkdir(parents=True)
    mark = leftover.with_name(".tmp-mark-1f-0")
    mark.touch()
    trainer = make_trainer(model_dir, tmp_path)
    assert not trainer.resume()
    trainer.save()
    trainer.close()
    assert not leftover.exists()
    assert not mark.exists()


def test_missing_checkpoint_is_named_with_those_that_exist(model_dir: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model_dir, tmp_path)
    trainer.save()
    trainer.close()
    checkpoints = Checkpoints(tmp_path / "checkpoints", World(), keep=2)
    with pytest.raises(CheckpointError, match=r"step 5 .* There: 0"):
        checkpoints.load(5, trainer.policy.model, trainer._optimiser)


def test_failed_write_is_reported_by_the_next_call(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(model_dir, tmp_path)

    def full_disk(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("shoal.training.checkpoints.os.replace", full_disk)
    monkeypatch.setattr("shoal.training.checkpoints.write_atomic", lambda path, data: path.write_bytes(data))
    trainer.save()
    with pytest.raises(CheckpointError, match="No space left"):
        trainer.close()


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldWriter]:
    held = HeldWriter(monkeypatch)
    yield held
    held.release()


def save_and_die(trainer: Trainer, error: type[BaseException]) -> None:
    with trainer:
        trainer.save()
        raise error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_training_that_ends_by_an_exception_waits_for_its_writer(
    model_dir: Path, tmp_path: Path, writer: HeldWriter, error: type[BaseException]
) -> None:
    trainer = make_trainer(model_dir, tmp_path)
    writer.hold()
    with pytest.raises(error):
        save_and_die(trainer, error)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000000"]
    assert make_trainer(model_dir, tmp_path).resume()


@pytest.mark.parametrize("waiting", ["save", "close", "end"])
def test_an_interruption_while_it_waits_for_the_writer_does_not_leave_it_behind(
    model_dir: Path, tmp_path: Path, writer: HeldWriter, waiting: str
) -> None:
    trainer = make_trainer(model_dir, tmp_path)

    def interrupted() -> None:
        with trainer:
            trainer.save()
            writer.interrupt_next_wait = True
            if waiting != "end":
                getattr(trainer, waiting)()

    writer.hold()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000000"]


def test_a_failed_write_is_reported_once(model_dir: Path, tmp_path: Path, writer: HeldWriter) -> None:
    trainer = make_trainer(model_dir, tmp_path)
    writer.failure = OSError("No space left on device")
    trainer.save()
    with pytest.raises(CheckpointError, match="No space left"):
        trainer.close()
    writer.failure = None
    trainer.save()
    trainer.close()
    assert trainer.checkpoint_steps() == [0]


@pytest.mark.parametrize("failure", [OSError("No space left on device"), RuntimeError("connection closed by peer")])
def test_a_failed_write_does_not_hide_what_ended_the_training(
    model_dir: Path, tmp_path: Path, writer: HeldWriter, failure: Exception
) -> None:
    trainer = make_trainer(model_dir, tmp_path)
    writer.failure = failure
    with pytest.raises(KeyboardInterrupt) as caught:
        save_and_die(trainer, KeyboardInterrupt)
    assert str(failure) in caught.value.__notes__[0]


def test_an_exception_on_one_rank_does_not_wait_for_the_others(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(model_dir, tmp_path)
    barriers: list[None] = []
    monkeypatch.setattr(World, "barrier", lambda world: barriers.append(None))
    with pytest.raises(RuntimeError):
        save_and_die(trainer, RuntimeError)
    assert len(barriers) == 1  # before the writer started


@pytest.mark.parametrize("damage", ["metadata", "data"])
def test_damaged_checkpoint_says_what_to_do(model_dir: Path, tmp_path: Path, damage: str) -> None:
    trainer = make_trainer(model_dir, tmp_path)
    trainer.save()
    trainer.close()
    directory = tmp_path / "checkpoints" / "step-00000000"
    victim = directory / ".metadata" if damage == "metadata" else next(directory.glob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:50])
    with pytest.raises(CheckpointError, match="remove it to resume"):
        trainer.resume()


def test_checkpoint_of_another_model_is_refused(model_dir: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model_dir, tmp_path)
    trainer.save()
    trainer.close()
    other = tmp_path / "other"
    config = LlamaConfig.from_pretrained(model_dir)
    config.intermediate_size = 48
    LlamaForCausalLM(config).save_pretrained(other)
    with pytest.raises(CheckpointError, match="another model"):
        make_trainer(other, tmp_path).resume()


def test_saving_before_the_first_update_does_not_change_it(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    saved, plain = (make_trainer(model_dir, tmp_path / name) for name in ("saved", "plain"))
    saved.save()
    for trainer in (saved, plain):
        trainer.train_step(groups(0, groups=2))
    weights = [b"".join(bytes(tensor.data) for tensor in trainer.wire_tensors()) for trainer in (saved, plain)]
    assert weights[0] == weights[1]
    saved.close()
