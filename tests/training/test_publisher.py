"""Versions leave beside the training, in order; killed at any point, a trainer gives every number the same bytes again."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import InvalidStateError
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from shoal.broadcast import Origin, OriginSettings, WireTensor
from shoal.config import ShoalConfig, build_config
from shoal.protocol import api
from shoal.training import Trainer
from shoal.training.publisher import Published, Publisher, Publishing, RepeatedStepError, Version
from shoal.training.service import TrainerService
from shoal.training.snapshots import Snapshot
from support.fake_coordinator import FakeCoordinator, Refuse
from support.samples import descriptor, keypair

from .test_service import GROUP_SIZE, record_batch

PATIENCE_S = 60.0
"""How long a thread of a test waits for another one before the test fails."""


def version(number: int, content: int | None = None) -> Version:
    data = bytes([number if content is None else content]) * 64
    snapshot = Snapshot(lambda: [WireTensor("w", "bfloat16", (32,), data)])
    return Version(number, snapshot, {"task_reward_mean": 0.5}, waited_s=0.25)


@pytest.fixture
def coordinator() -> FakeCoordinator:
    return FakeCoordinator()


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    return Origin(tmp_path / "origin", keypair("run"), OriginSettings(run_id="run-1"))


def make_publisher(origin: Origin, coordinator: FakeCoordinator, seen: list[Published] | None = None) -> Publisher:
    on_published = seen.append if seen is not None else lambda _: None
    return Publisher(origin, coordinator.client(keypair("trainer")), on_published=on_published)


def announced(origin: Origin) -> list[int]:
    return [entry.version for entry in origin.head.versions] if origin.head is not None else []


def leave(publisher: Publisher, handed_over: Version, error: BaseException, **options: bool) -> None:
    """Something else of the trainer fails while a version is on its way."""
    with publisher:
        publisher.start(handed_over, **options)
        raise error


class Gate:
    """Stops every thread that calls a function until the test opens it."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._inner = inner

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)
        return self._inner(*arguments, **named)


def test_each_version_is_recorded_before_it_is_announced(
    origin: Origin, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    seen: list[Published] = []
    publisher = make_publisher(origin, coordinator, seen)
    announce = origin.announce

    def note(ledger_head: str) -> object:
        order.append(f"recorded {[body.version for body in coordinator.versions]}, announced {announced(origin)}")
        return announce(ledger_head=ledger_head)

    monkeypatch.setattr(origin, "announce", note)
    for number in range(2):
        publisher.start(version(number))
        publisher.wait()
    assert order == ["recorded [0], announced []", "recorded [0, 1], announced [0]"]
    assert announced(origin) == [0, 1]
    assert coordinator.versions[1].report["time_standstill_s"] == 0.25
    assert [published.version.number for published in seen] == [0, 1]


def test_the_caller_goes_on_at_once(
    origin: Origin, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(origin.stage)
    monkeypatch.setattr(origin, "stage", gate)
    publisher = make_publisher(origin, coordinator)
    publishing = publisher.start(version(0))  # returns although staging cannot end
    assert gate.reached.wait(PATIENCE_S)
    publisher.check()
    assert not publishing.recorded.done()
    with pytest.raises(AssertionError, match="one version"):
        publisher.start(version(1))
    gate.opened.set()
    publisher.wait()
    assert announced(origin) == [0]


@pytest.mark.parametrize("code", ["version_conflict", "version_order"])
def test_after_a_failure_nothing_is_announced(origin: Origin, coordinator: FakeCoordinator, code: str) -> None:
    publisher = make_publisher(origin, coordinator)
    coordinator.refusals["/v1/versions"] = Refuse(code, status=409)
    publishing = publisher.start(version(0))
    assert not publishing.is_recorded()
    wanted = RepeatedStepError if code == "version_conflict" else Exception
    for ask in (publisher.wait, publisher.check):
        with pytest.raises(wanted):
            ask()
    assert announced(origin) == []


def test_other_bytes_under_an_announced_number_are_refused(origin: Origin, coordinator: FakeCoordinator) -> None:
    publisher = make_publisher(origin, coordinator)
    publisher.start(version(0))
    publisher.wait()
    publisher.start(version(0, content=9))
    with pytest.raises(RepeatedStepError, match="Version 0 is already published"):
        publisher.wait()


def test_a_held_version_is_announced_when_it_is_released(origin: Origin, coordinator: FakeCoordinator) -> None:
    publisher = make_publisher(origin, coordinator)
    publishing = publisher.start(version(0), held=True)
    assert publishing.is_recorded()
    assert announced(origin) == []
    publishing.release()
    publisher.wait()
    assert announced(origin) == [0]


def test_a_held_version_is_not_announced_after_an_error(origin: Origin, coordinator: FakeCoordinator) -> None:
    publisher = make_publisher(origin, coordinator)
    with pytest.raises(OSError, match="checkpoint"):
        leave(publisher, version(0), OSError("no space for the checkpoint"), held=True)
    assert [body.version for body in coordinator.versions] == [0]
    assert announced(origin) == []


def test_an_error_elsewhere_lets_the_version_on_its_way_arrive_and_notes_its_failure(
    origin: Origin, coordinator: FakeCoordinator
) -> None:
    publisher = make_publisher(origin, coordinator)
    with pytest.raises(ValueError, match="diverged"):
        leave(publisher, version(0), ValueError("diverged"))
    assert announced(origin) == [0]
    coordinator.refusals["/v1/versions"] = Refuse("version_order", status=409)
    with pytest.raises(ValueError, match="diverged") as raised:
        leave(publisher, version(1), ValueError("diverged"))
    assert "Version 1 was not published" in raised.value.__notes__[0]


def test_an_interruption_does_not_wait_for_a_coordinator_that_is_away(
    origin: Origin, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.training.publisher.INTERRUPTED_WAIT_S", 0.0)
    client = coordinator.client(keypair("trainer"))
    gate = Gate(client.publish)
    monkeypatch.setattr(client, "publish", gate)
    publisher = Publisher(origin, client)
    publishing: list[Publishing] = []
    start = publisher.start
    monkeypatch.setattr(publisher, "start", lambda *given: publishing.append(start(*given)))
    with pytest.raises(KeyboardInterrupt):
        leave(publisher, version(0), KeyboardInterrupt())
    assert not publishing[0].is_recorded()  # so that its checkpoint is dropped, not waited for
    gate.opened.set()
    with pytest.raises(InvalidStateError):
        publishing[0].ended.result(PATIENCE_S)
    assert announced(origin) == []


# The whole trainer.


class DurableCoordinator(FakeCoordinator):
    """Keeps what it recorded in a file, refuses other bytes under a recorded number, and has a batch for every step."""

    def __init__(self, file: Path, steps: int) -> None:
        super().__init__()
        self.file = file
        for step in range(steps):
            record_batch(self, step)

    def recorded(self) -> dict[int, tuple[str, str]]:
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return {number: (manifest, weights) for number, manifest, weights in map(json.loads, lines)}

    def _version(self, rest: str, content: bytes) -> BaseModel:
        body = api.VersionBody.model_validate_json(content)
        known = self.recorded().get(body.version)
        if known is None:
            with self.file.open("a") as file:
                file.write(json.dumps([body.version, body.manifest_digest, body.weights_digest]) + "\n")
        elif known != (body.manifest_digest, body.weights_digest):
            raise Refuse("version_conflict", status=409)
        return super()._version(rest, content)


STEPS = 4


@pytest.fixture
def config(tmp_path: Path) -> ShoalConfig:
    training = {"learning_rate": 1e-2, "kl_beta": 0.0, "checkpoint_every": 2, "minibatches": 1, "kl_limit": 100.0}
    return build_config({"run": {"dir": tmp_path, "steps": STEPS}, "training": training})


Start = Callable[[Path], TrainerService]


@pytest.fixture
def start(config: ShoalConfig, model_dir: Path) -> Iterator[Start]:
    trainers: list[Trainer] = []

    def make(root: Path) -> TrainerService:
        trainers.append(Trainer(config.training, model_dir, work_dir=root / "trainer", temperature=1.0, seed=7))
        settings = OriginSettings(run_id="run-1", delta_from_bytes=0, keyframe_every=2)
        origin = Origin(root / "origin", keypair("run"), settings)
        run = descriptor(rollouts=descriptor().rollouts.model_copy(update={"group_size": GROUP_SIZE}))
        client = DurableCoordinator(root / "recorded.jsonl", STEPS).client(keypair("trainer"))
        return TrainerService(config, run, trainers[-1], client, origin)

    yield make
    for trainer in trainers:
        trainer.close()


def origin_of(service: TrainerService) -> Origin:
    assert service.publisher is not None
    return service.publisher.origin


def recorded(root: Path) -> dict[int, tuple[str, str]]:
    return DurableCoordinator(root / "recorded.jsonl", 0).recorded()


def checkpoint(root: Path, step: int) -> Path:
    return root / "trainer" / "checkpoints" / f"step-{step:08d}"


def test_a_step_is_trained_while_the_version_before_is_staged(start: Start, tmp_path: Path) -> None:
    service = start(tmp_path)
    trained = {step: threading.Event() for step in range(STEPS)}
    stage, train_step = origin_of(service).stage, service.trainer.train_step

    def stage_after_the_next_step(number: int, tensors: Any) -> Any:
        if number in trained:
            assert trained[number].wait(PATIENCE_S), "training stood still until the version was staged"
        return stage(number, tensors)

    def note(groups: Any, settle: Any = None) -> Any:
        report = train_step(groups, settle)
        trained[report.step].set()
        return report

    origin_of(service).stage = stage_after_the_next_step  # type: ignore[method-assign, assignment]
    service.trainer.train_step = note  # type: ignore[method-assign]
    assert service.run()
    overlapped = recorded(tmp_path)
    assert announced(origin_of(service)) == [0, 1, 2, 3, 4]
    start(tmp_path / "again").run()
    assert recorded(tmp_path / "again") == overlapped  # what is published does not depend on who was faster


def test_no_checkpoint_appears_before_its_version_is_recorded(start: Start, tmp_path: Path) -> None:
    service, early = start(tmp_path), []
    publish = service.client.publish

    def look(body: api.VersionBody) -> api.VersionAnswer:
        early.append(checkpoint(tmp_path, body.version).exists())
        return publish(body)

    service.client.publish = look  # type: ignore[method-assign]
    assert service.run()
    assert early == [False] * (STEPS + 1)
    assert checkpoint(tmp_path, STEPS).exists()


def test_a_failed_publisher_ends_a_trainer_that_waits_for_a_batch(start: Start, tmp_path: Path) -> None:
    """Nobody got the version, so the batch would never be complete."""
    service = start(tmp_path)

    def fail(number: int, tensors: Any) -> Any:
        raise OSError("No space left on device")

    def no_batch(step: int, wait_s: float) -> api.BatchAnswer:
        assert service.publisher is not None
        with pytest.raises(OSError, match="No space"):
            service.publisher.wait()
        return api.BatchAnswer(waiting_for="everything")

    origin_of(service).stage = fail  # type: ignore[method-assign, assignment]
    service.client.batch = no_batch  # type: ignore[method-assign, assignment]
    with pytest.raises(OSError, match="No space"):
        service.run()
    assert announced(origin_of(service)) == []
    assert service.trainer.checkpoint_steps() == []


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_the_snapshot(service: TrainerService) -> None:
    take = service.trainer.snapshot

    def kill() -> Any:
        return die() if service.trainer.step == 2 else take()

    service.trainer.snapshot = kill  # type: ignore[method-assign]


def during_staging(service: TrainerService) -> None:
    origin = origin_of(service)
    stage = origin.stage

    def kill(number: int, tensors: Any) -> Any:
        if number == 2:
            origin.store.put = lambda *_: die()  # type: ignore[method-assign, assignment]
        return stage(number, tensors)

    origin.stage = kill  # type: ignore[method-assign, assignment]


def hold_staging(service: TrainerService, held: int) -> None:
    origin = origin_of(service)
    stage = origin.stage

    def hold(number: int, tensors: Any) -> Any:
        return threading.Event().wait() if number == held else stage(number, tensors)

    origin.stage = hold  # type: ignore[method-assign, assignment]


def while_the_next_step_is_trained(service: TrainerService) -> None:
    hold_staging(service, 2)
    train_step = service.trainer.train_step

    def kill(groups: Any, settle: Any = None) -> Any:
        report = train_step(groups, settle)
        return die() if report.step == 2 else report

    service.trainer.train_step = kill  # type: ignore[method-assign]


def between_record_and_announcement(service: TrainerService, number: int = 2) -> None:
    origin = origin_of(service)
    announce = origin.announce

    def kill(ledger_head: str) -> Any:
        return die() if max(recorded(service.config.run.dir)) == number else announce(ledger_head=ledger_head)

    origin.announce = kill  # type: ignore[method-assign]


def before_the_last_announcement(service: TrainerService) -> None:
    between_record_and_announcement(service, STEPS)


def between_announcement_and_checkpoint(service: TrainerService) -> None:
    hold_staging(service, 3)  # or a fast trainer records the next version before the writer dies
    is_recorded = Publishing.is_recorded

    def kill(publishing: Publishing) -> bool:
        if publishing.version.number == 2:
            publishing.ended.result()
            die()
        return is_recorded(publishing)

    Publishing.is_recorded = kill  # type: ignore[method-assign, assignment]  # only in the child that is killed


KILLS: dict[Callable[[TrainerService], None], tuple[int, int, int]] = {
    before_the_snapshot: (1, 1, 0),
    during_staging: (1, 1, 0),
    while_the_next_step_is_trained: (1, 1, 0),
    between_record_and_announcement: (2, 1, 0),
    between_announcement_and_checkpoint: (2, 2, 0),
    before_the_last_announcement: (4, 3, 4),
}
"""What is left: the newest recorded version, the newest announced one, and the least that the newest checkpoint is of."""


@pytest.fixture(scope="module")
def truth() -> dict[int, tuple[str, str]]:
    """Filled by the first test that runs to the end without a kill."""
    return {}


@pytest.mark.parametrize("arrange", KILLS, ids=lambda arrange: arrange.__name__)
def test_killed_at_any_point_the_same_bytes_follow_under_the_same_number(
    arrange: Callable[[TrainerService], None], start: Start, tmp_path: Path, truth: dict[int, tuple[str, str]]
) -> None:
    child = os.fork()
    if child == 0:
        try:
            service = start(tmp_path)
            arrange(service)
            service.run()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    newest_recorded, newest_announced, oldest_start = KILLS[arrange]
    before = recorded(tmp_path)
    assert max(before) == newest_recorded
    service = start(tmp_path)
    assert announced(origin_of(service))[-1] == newest_announced
    begun_at = max(service.trainer.checkpoint_steps(), default=0)
    assert oldest_start <= begun_at <= newest_recorded  # no checkpoint of a version that was not recorded
    assert service.run()
    after = recorded(tmp_path)
    assert {number: after[number] for number in before} == before
    assert announced(origin_of(service)) == [0, 1, 2, 3, 4]
    head = origin_of(service).head
    assert head is not None
    assert [entry.manifest_digest for entry in head.versions] == [after[number][0] for number in range(STEPS + 1)]
    if not truth:
        assert start(tmp_path / "undisturbed").run()
        truth |= recorded(tmp_path / "undisturbed")
    assert {number: weights for number, (_, weights) in after.items()} == {
        number: weights for number, (_, weights) in truth.items()
    }
