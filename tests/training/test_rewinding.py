"""A trainer takes up a rewind: voided checkpoints and versions go, and training goes on from the version that is left.

Killed between any two durable writes of it, or of a recall, the run resumes to the same bytes.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.config import ShoalConfig
from shoal.errors import RefusedError
from shoal.metrics import EventLog
from shoal.protocol import api
from shoal.protocol.steps import Rewind
from shoal.training import Trainer
from shoal.training.publisher import RepeatedStepError
from shoal.training.service import TrainerService
from support.fake_coordinator import FakeCoordinator
from support.tiny_run import Reports

from .test_service import Start, config, coordinator, lose_last_checkpoint, origin_of, published, record_batch, start

__all__ = ["config", "coordinator", "start"]
STEPS = 3


class Killed(BaseException):
    """As kill -9: nothing that the process would have written later is written."""


class Killer:
    """Lets some durable writes pass, then kills: the next one, and all after it, do not happen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, passing: int, *, after: bool = False) -> None:
        self.left, self.after, self.is_dead = passing, after, False
        for name in ("replace", "unlink", "rename"):
            monkeypatch.setattr(os, name, self._guard(getattr(os, name)))
        monkeypatch.setattr(shutil, "rmtree", self._guard(shutil.rmtree))

    def _guard(self, real: Callable[..., object]) -> Callable[..., object]:
        def guarded(*arguments: object, **settings: object) -> object:
            if self.is_dead:
                raise Killed
            self.left -= 1
            if self.left < 0:
                self.is_dead = True
                if self.after:
                    real(*arguments, **settings)
                raise Killed
            return real(*arguments, **settings)

        return guarded


def rewind_to(coordinator: FakeCoordinator, version: int, newest: int, epoch: int = 1) -> None:
    """As the coordinator does it: other batches follow, and the voided versions are forgotten."""
    view = api.RewindView(
        epoch=epoch, version=version, newest_before=newest, groups=4, audits=0, at=0.0, reason="a bad step"
    )
    rewinds = [*coordinator.line.rewinds, view]
    coordinator.line = api.LineAnswer(epoch=epoch, newest_version=version, rewinds=rewinds, ledger_head="cd" * 32)
    for step in range(version, STEPS):
        batch = record_batch(coordinator, step, groups=1).model_copy(update={"epoch": epoch})
        coordinator.batches[step] = api.BatchAnswer(batch=batch)


@pytest.fixture
def trained(start: Start, coordinator: FakeCoordinator) -> dict[int, str]:
    """A finished run with checkpoints of steps 2 and 3; the weights of its versions."""
    for step in range(STEPS):
        record_batch(coordinator, step)
    start().run()
    return dict(published(coordinator))


def head_of(service: TrainerService) -> list[tuple[int, int]]:
    head = origin_of(service).head
    assert head is not None
    return [(entry.epoch, entry.version) for entry in head.versions]


def test_training_goes_on_from_the_version_that_the_run_returned_to(
    start: Start, coordinator: FakeCoordinator, trained: dict[int, str]
) -> None:
    rewind_to(coordinator, 2, STEPS)
    service = start(report=(said := Reports()))
    counter = origin_of(service).head.counter  # type: ignore[union-attr]
    assert service.run()
    assert said.some("returned to version 2: versions up to 3 are void, 1 steps are trained again (a bad step)")
    assert said.some("resumed at step 2")
    now = dict(published(coordinator))
    assert now[2] == trained[2]
    assert now[3] != trained[3]
    assert head_of(service) == [(0, 0), (0, 1), (0, 2), (1, 3)]
    head = origin_of(service).head
    assert head is not None
    assert head.epoch == 1
    assert head.counter > counter, "who has seen the new head takes no old one"
    assert service.trainer.checkpoint_steps() == [2, 3]


def test_a_rewind_to_the_beginning_starts_from_the_base_model(
    start: Start, coordinator: FakeCoordinator, trained: dict[int, str]
) -> None:
    rewind_to(coordinator, 0, STEPS)
    service = start(report=(said := Reports()))
    assert service.run()
    assert said.some("found no checkpoint, starting at step 0")
    assert dict(published(coordinator))[0] == trained[0]
    assert head_of(service) == [(0, 0), (1, 1), (1, 2), (1, 3)]


def test_a_second_start_takes_nothing_up_again(
    start: Start, coordinator: FakeCoordinator, trained: dict[int, str]
) -> None:
    rewind_to(coordinator, 2, STEPS)
    start().run()
    first = published(coordinator)
    coordinator.versions.clear()
    again = start(report=(said := Reports()))
    again.run()
    assert not said.some("returned to version")
    assert published(coordinator) == first[-1:]


def test_a_double_rewind_is_taken_up_at_once(
    start: Start, coordinator: FakeCoordinator, trained: dict[int, str]
) -> None:
    rewind_to(coordinator, 2, STEPS)
    start().run()
    rewind_to(coordinator, 2, STEPS, epoch=2)
    rewind_to(coordinator, 0, 2, epoch=3)
    service = start()
    assert service.run()
    assert head_of(service) == [(0, 0), (3, 1), (3, 2), (3, 3)]


def test_a_trainer_that_runs_hears_of_a_rewind_with_its_next_request(
    start: Start, coordinator: FakeCoordinator
) -> None:
    """The version in flight is not recorded, and its checkpoint does not appear."""
    for step in range(STEPS):
        record_batch(coordinator, step)
    service = start()
    train_step = service.trainer.train_step

    def rewound_meanwhile(*arguments: object) -> object:
        if service.trainer.step == 2:
            assert service.publisher is not None
            service.publisher.wait()
            service.trainer.close()
            rewind_to(coordinator, 0, 2)
        return train_step(*arguments)  # type: ignore[arg-type]

    service.trainer.train_step = rewound_meanwhile  # type: ignore[method-assign, assignment]
    with pytest.raises(RefusedError) as news:
        service.run()
    assert (news.value.code, news.value.permanent) == ("rewound", False)
    assert [version for version, _ in published(coordinator)] == [0, 1, 2]
    assert service.trainer.checkpoint_steps() == [0, 2]
    coordinator.versions.clear()
    again = start()
    assert again.run()
    assert head_of(again) == [(0, 0), (1, 1), (1, 2), (1, 3)]


def finished_after(
    start: Start, coordinator: FakeCoordinator, root: Path, kill: Callable[[TrainerService], None] | None = None
) -> tuple[dict[int, str], list[tuple[int, int]]]:
    """What a trainer in a copy of the run ends with, if another one was killed there before."""
    coordinator.versions.clear()
    if kill is not None:
        kill(start(root=root))
    service = start(root=root)
    assert service.run()
    return dict(published(coordinator)), head_of(service)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_between_any_two_writes_the_run_resumes_to_the_same_bytes(
    start: Start,
    coordinator: FakeCoordinator,
    trained: dict[int, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: bool,
) -> None:
    def copy(name: str) -> Path:
        for part in ("trainer", "origin"):
            shutil.copytree(tmp_path / part, tmp_path / name / part)
        return tmp_path / name

    rewind_to(coordinator, 2, STEPS)
    undisturbed = finished_after(start, coordinator, copy("undisturbed"))
    assert undisturbed[0][3] != trained[3]
    for point in range(20):
        is_over = False

        def kill(service: TrainerService) -> None:
            nonlocal is_over
            with monkeypatch.context() as patch:
                killer = Killer(patch, point, after=after)  # noqa: B023
                try:
                    service.take_up()
                except Killed:
                    return
            is_over = not killer.is_dead

        found = finished_after(start, coordinator, copy(f"{after}-{point}"), kill)
        assert found == undisturbed, f"killed at write {point}"
        if is_over:
            break
    assert 3 <= point < 20, "checkpoint renamed, checkpoint removed, head replaced"


@pytest.mark.parametrize("where", ["before the request", "after the answer", "after the checkpoint is loaded"])
def test_killed_anywhere_in_a_recall_the_run_resumes_to_the_same_bytes(
    start: Start, coordinator: FakeCoordinator, config: ShoalConfig, tmp_path: Path, where: str
) -> None:
    training = config.training.model_copy(update={"kl_limit": 0.05, "checkpoint_every": 2})
    settings = config.model_copy(update={"training": training})
    for step in range(STEPS):
        record_batch(coordinator, step)
    good = record_batch(coordinator, 1, groups=1).model_copy(update={"attempt": 1})
    coordinator.batches[1] = api.BatchAnswer(batch=good)
    start(settings, root=tmp_path / "clean").run()
    undisturbed = dict(published(coordinator))
    coordinator.versions.clear()

    record_batch(coordinator, 1, verified=True)  # diverges
    coordinator.audited_batches = [good]
    killed = start(settings)
    recall, resume = killed.client.recall, killed.trainer.resume

    def dies_in_recall(body: api.RecallBody) -> api.RecallAnswer:
        if where == "after the answer":
            recall(body)
        raise Killed

    def dies_after_load() -> bool:
        loaded = resume()
        if killed.trainer.step == 0 and coordinator.recall:
            raise Killed
        return loaded

    if where == "after the checkpoint is loaded":
        killed.trainer.resume = dies_after_load  # type: ignore[method-assign]
    else:
        killed.client.recall = dies_in_recall  # type: ignore[method-assign]
    with pytest.raises(Killed):
        killed.run()
    assert start(settings, metrics=EventLog()).run()
    assert dict(published(coordinator)) == undisturbed
    assert len(coordinator.recall) == 1


def test_a_repeated_step_with_other_bytes_can_be_rewound(
    start: Start, coordinator: FakeCoordinator, config: ShoalConfig
) -> None:
    """It ended the run with no way on."""
    for step in range(STEPS):
        record_batch(coordinator, step)
    killed = start()
    killed.run()
    lose_last_checkpoint(killed.trainer)
    first = dict(published(coordinator))
    other = config.model_copy(update={"training": config.training.model_copy(update={"learning_rate": 0.02})})
    with pytest.raises(RepeatedStepError) as stuck:
        start(other).run()
    assert "shoal run rewind" in stuck.value.hint
    assert "--auto-rewind" in stuck.value.hint
    rewind_to(coordinator, 2, STEPS)
    coordinator.versions.clear()
    service = start(other)
    assert service.run()
    now = dict(published(coordinator))
    assert now[2] == first[2]
    assert now[3] != first[3]


def test_checkpoints_say_in_which_epoch_they_were_made(model_dir: Path, config: ShoalConfig, tmp_path: Path) -> None:
    with Trainer(config.training, model_dir, work_dir=tmp_path, temperature=1.0, seed=7) as trainer:
        for step, epoch in ((2, 0), (4, 0), (6, 1), (8, 1)):
            trainer.step, trainer.epoch = step, epoch
            trainer._checkpoints._keep = 9
            trainer.save()
        trainer.close()
        assert trainer.drop_void([Rewind(1, 4)]) == []
        assert trainer.drop_void([Rewind(1, 4), Rewind(2, 6)]) == [8]
        assert trainer.drop_void([Rewind(1, 2), Rewind(2, 6)]) == [4]
        assert trainer.checkpoint_steps() == [2, 6]
