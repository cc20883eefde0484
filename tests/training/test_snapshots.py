"""A snapshot holds the weights as they were, no matter which thread copies them, and when."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from shoal.broadcast import WireTensor
from shoal.training import Group
from shoal.training.snapshots import Snapshot

from .test_trainer import make_trainer

Groups = Callable[..., list[Group]]
TENSOR = WireTensor("w", "bfloat16", (1,), b"\x00\x00")


def content(tensors: Sequence[WireTensor]) -> list[bytes]:
    return [bytes(tensor.data) for tensor in tensors]


def test_a_copy_is_made_once(tmp_path: Path) -> None:
    made: list[int] = []

    def take() -> list[WireTensor]:
        made.append(1)
        return [TENSOR]

    snapshot = Snapshot(take)
    assert snapshot.tensors() is snapshot.tensors()
    snapshot.secure()
    assert made == [1]


def test_a_trainer_that_trains_on_before_anybody_copied_makes_the_copy_itself(
    model_dir: Path, tmp_path: Path, groups: Groups
) -> None:
    trainer = make_trainer(model_dir, tmp_path)
    before = content(trainer.wire_tensors())
    snapshot = trainer.snapshot()
    trainer.train_step(groups(0))
    assert content(snapshot.tensors()) == before
    assert content(trainer.wire_tensors()) != before


def test_a_trainer_that_returns_to_a_checkpoint_leaves_the_snapshot_as_it_was(
    model_dir: Path, tmp_path: Path, groups: Groups
) -> None:
    trainer = make_trainer(model_dir, tmp_path)
    trainer.save()
    trainer.train_step(groups(0))
    changed = content(trainer.wire_tensors())
    snapshot = trainer.snapshot()
    assert trainer.resume()
    assert content(snapshot.tensors()) == changed


def test_the_weights_do_not_change_while_another_thread_copies_them(
    model_dir: Path, tmp_path: Path, groups: Groups
) -> None:
    trainer = make_trainer(model_dir, tmp_path)
    before = content(trainer.wire_tensors())
    begun, go_on = threading.Event(), threading.Event()
    take = trainer._wire_copy.take

    def slow_take(*, here: bool) -> list[WireTensor]:
        begun.set()
        assert go_on.wait(60)
        return take(here=here)

    trainer._wire_copy.take = slow_take  # type: ignore[method-assign, assignment]
    snapshot = trainer.snapshot()
    publisher = threading.Thread(target=snapshot.tensors)
    publisher.start()
    assert begun.wait(60)
    training = threading.Thread(target=trainer.train_step, args=(groups(0),))
    training.start()
    go_on.set()
    training.join(60)
    publisher.join(60)
    assert trainer.step == 1
    assert content(snapshot.tensors()) == before


def test_a_trainer_that_waits_counts_how_long() -> None:
    times = iter([10.0, 12.5])
    snapshot = Snapshot(lambda: [TENSOR], clock=lambda: next(times))
    snapshot.secure()
    assert snapshot.stood_still_s == 2.5


def test_a_copy_that_fails_is_reported_to_both_sides() -> None:
    def fail() -> list[WireTensor]:
        raise MemoryError("no room")

    snapshot = Snapshot(fail)
    with pytest.raises(MemoryError):
        snapshot.tensors()
    with pytest.raises(MemoryError):
        snapshot.secure()
