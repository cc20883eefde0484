"""The trainer as a role: recorded batches in, published versions out, and the same again after a kill."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.broadcast import Origin, OriginSettings
from shoal.config import ShoalConfig, build_config
from shoal.errors import IntegrityError
from shoal.files import digest_bytes
from shoal.metrics import EventLog
from shoal.protocol import api
from shoal.protocol.rollouts import Rollout, RolloutHeader, write_rollouts
from shoal.training import DivergedError, Group, Trackers, Trainer
from shoal.training.disks import CheckpointError
from shoal.training.publisher import RepeatedStepError
from shoal.training.service import StepRecord, TrainerService
from shoal.training.snapshots import Snapshot
from support.fake_coordinator import FakeCoordinator, Refuse
from support.held_writer import HeldWriter
from support.samples import NUMERICS_CLASS, descriptor, keypair
from support.tiny_disks import TinyDisk
from support.tiny_run import Reports

GROUP_SIZE = 4
VOCABULARY = 32


def rows(step: int) -> list[Rollout]:
    """Two groups of four samples, as they would lie in a submission."""
    return [
        Rollout(
            task_id=f"task-{group}",
            group=group,
            sample=sample,
            input_tokens=[1, 2, 3 + group],
            output_tokens=[(step + 5 * group + 3 * sample + index) % VOCABULARY for index in range(4 + sample)],
            segment_lengths=[4 + sample],
            output_logprobs=[-1.5] * (4 + sample),
            target_length=0,
            task_reward=9.0,
            length_penalty=9.0,
            reward=9.0,
            finish_reason="length" if sample == 3 else "stop",
            proofs=[],
        )
        for group in range(2)
        for sample in range(GROUP_SIZE)
    ]


def record_batch(
    coordinator: FakeCoordinator, step: int, *, groups: int = 2, verified: bool = False
) -> api.BatchRecord:
    header = RolloutHeader(
        run_id="run-1",
        step=step,
        slot=0,
        lease_id=f"lease-{step}",
        worker_key=keypair("worker").public,
        policy_version=step,
        manifest_digest="ab" * 32,
        numerics_class=NUMERICS_CLASS,
    )
    data = write_rollouts(header, rows(step))
    submission_id = f"submission-{step}"
    coordinator.files[submission_id] = data
    batch = api.BatchRecord(
        step=step,
        groups=[
            api.BatchGroup(
                group_id=f"{step}/0/{group}",
                submission_id=submission_id,
                digest=digest_bytes(data),
                group=group,
                policy_version=step,
                rewards=[0.9, 0.1, 0.0, -0.1],
                task_rewards=[1.0, 0.0, 0.0, 0.0],
                logprobs_verified=verified,
            )
            for group in range(groups)
        ],
        dropped={"no_signal": 3},
        generated_groups=5,
        generated_reward_mean=0.55,
        generated_task_reward_mean=0.6,
    )
    coordinator.batches[step] = api.BatchAnswer(batch=batch)
    return batch


@pytest.fixture
def coordinator() -> FakeCoordinator:
    return FakeCoordinator()


@pytest.fixture
def config(tmp_path: Path) -> ShoalConfig:
    training = {"learning_rate": 1e-2, "kl_beta": 0.0, "checkpoint_every": 2, "minibatches": 1, "kl_limit": 100.0}
    return build_config({"run": {"dir": tmp_path, "steps": 3}, "training": training})


Start = Callable[..., TrainerService]


@pytest.fixture
def start(coordinator: FakeCoordinator, config: ShoalConfig, model_dir: Path, tmp_path: Path) -> Iterator[Start]:
    trainers: list[Trainer] = []

    def make(
        config: ShoalConfig = config, keep_versions: int = 8, root: Path = tmp_path, **options: object
    ) -> TrainerService:
        trainer = Trainer(config.training, model_dir, work_dir=root / "trainer", temperature=1.0, seed=7)
        trainers.append(trainer)
        origin = Origin(root / "origin", keypair("run"), OriginSettings(run_id="run-1", keep_versions=keep_versions))
        run = descriptor(rollouts=descriptor().rollouts.model_copy(update={"group_size": GROUP_SIZE}))
        client = coordinator.client(keypair("trainer"))
        return TrainerService(config, run, trainer, client, origin, **options)  # type: ignore[arg-type]

    yield make
    for trainer in trainers:
        trainer.close()


def lose_last_checkpoint(trainer: Trainer) -> None:
    """As if the disk had failed after the last version was published."""
    shutil.rmtree(trainer.save())


def origin_of(service: TrainerService) -> Origin:
    assert service.publisher is not None
    return service.publisher.origin


def publish(service: TrainerService, record: StepRecord | None = None) -> None:
    """Publish the current weights and wait until they are announced."""
    publishing = service.publish(record)
    if publishing is not None:
        publishing.release()
        publishing.ended.result()


def published(coordinator: FakeCoordinator) -> list[tuple[int, str]]:
    return [(body.version, body.weights_digest) for body in coordinator.versions]


def test_a_trainer_that_fails_waits_for_its_writer(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(step: int, wait_s: float, epoch: int) -> api.BatchAnswer:
        raise KeyboardInterrupt

    writer, service = HeldWriter(monkeypatch), start()
    monkeypatch.setattr(service.client, "batch", interrupt)
    writer.hold()
    try:
        with pytest.raises(KeyboardInterrupt):
            service.run()
        assert [path.name for path in (tmp_path / "trainer" / "checkpoints").iterdir()] == ["step-00000000"]
    finally:
        writer.release()


def test_every_version_is_staged_recorded_and_then_shown(
    start: Start, coordinator: FakeCoordinator, config: ShoalConfig
) -> None:
    for step in range(3):
        record_batch(coordinator, step)
    reports, metrics = Reports(), EventLog()
    service = start(report=reports, metrics=metrics)
    service.run()
    assert [version for version, _ in published(coordinator)] == [0, 1, 2, 3]
    assert len({digest for _, digest in published(coordinator)}) == 4
    head = origin_of(service).head
    assert head is not None
    assert [entry.version for entry in head.versions] == [0, 1, 2, 3]
    assert head.ledger_head == "ab" * 32
    assert head.versions[-1].manifest_digest == coordinator.versions[-1].manifest_digest
    assert reports.some("published version 3")
    assert metrics.counters["step"] == 3


def test_the_report_of_a_step_travels_with_its_version(start: Start, coordinator: FakeCoordinator) -> None:
    record_batch(coordinator, 0)
    service = start()
    publish(service, service.step())
    report = coordinator.versions[0].report
    assert report["task_reward_mean"] == pytest.approx(0.25)
    assert report["generated_groups"] == 5
    assert (report["generated_reward_mean"], report["generated_task_reward_mean"]) == (0.55, 0.6)
    assert "kl_behaviour" not in report, "no group was audited"
    assert report["dropped_no_signal"] == 3
    for phase in ("time_wait_batch_s", "time_fetch_s", "time_old_logprobs_s", "time_update_s", "time_stage_s"):
        assert isinstance(report[phase], float)


LOGGED = (
    *("reward_mean", "task_reward_mean", "length_term_mean", "ratio_mean", "ratio_max", "entropy"),
    *("clip_fraction_positive", "clip_fraction_negative", "kl_behaviour", "kl_update", "kl_reference"),
    *("grad_norm_mean", "grad_norm_max", "age_mean", "zero_signal_fraction", "truncation_rate", "tokens_per_s"),
    *("time_wait_batch_s", "time_stage_s", "time_announce_s", "generated_groups", "dropped_no_signal"),
)


MEANS = (
    "reward_mean",
    "task_reward_mean",
    "kl_behaviour",
    "kl_update",
    "entropy",
    "ratio_mean",
    "age_mean",
    "age_histogram",
)


def recorded_step(start: Start, config: ShoalConfig, tmp_path: Path) -> dict[str, object]:
    """What one step writes about itself."""
    once = config.model_copy(update={"run": config.run.model_copy(update={"steps": 1})})
    trackers = Trackers(tmp_path)
    start(once, trackers=trackers).run()
    trackers.close()
    (line,) = (tmp_path / "steps.jsonl").read_text().splitlines()
    record: dict[str, object] = json.loads(line)
    return record


def test_the_record_of_a_step_holds_every_figure(
    start: Start, coordinator: FakeCoordinator, config: ShoalConfig, tmp_path: Path
) -> None:
    record_batch(coordinator, 0, verified=True)
    record = recorded_step(start, config, tmp_path)
    assert [name for name in LOGGED if not isinstance(record.get(name), float | int)] == []
    assert record["age_histogram"] == {"0": 8}
    assert record["zero_signal_fraction"] == 3 / 5
    assert record["truncation_rate"] == 1 / 4
    assert record["length_term_mean"] == pytest.approx(-0.025)
    assert float(str(record["kl_behaviour"])) > 0


def test_a_step_without_groups_has_counts_and_times_and_no_means(
    start: Start, coordinator: FakeCoordinator, config: ShoalConfig, tmp_path: Path
) -> None:
    record_batch(coordinator, 0, groups=0)
    record = recorded_step(start, config, tmp_path)
    assert [name for name in MEANS if name in record] == []
    assert (record["samples"], record["generated_groups"], record["generated_reward_mean"]) == (0, 5, 0.55)


def test_a_guard_that_sees_no_audited_group_says_so_and_when_it_is_back(
    start: Start, coordinator: FakeCoordinator
) -> None:
    reports, metrics = Reports(), EventLog()
    for step, verified in enumerate((False, False, True)):
        record_batch(coordinator, step, verified=verified)
    assert start(report=reports, metrics=metrics).run()
    said = [line for line in reports if "training.kl_limit" in line]
    assert ["cannot guard" in said[0], "guards against lag again" in said[1], len(said)] == [True, True, 2]
    assert said[0].startswith("step 0")
    assert said[1].startswith("step 2")


def test_a_batch_that_diverges_is_undone_and_the_run_goes_on_without_its_bad_groups(
    start: Start, coordinator: FakeCoordinator, config: ShoalConfig, tmp_path: Path
) -> None:
    """Such a batch ended the run for good."""
    training = config.training.model_copy(update={"kl_limit": 0.05, "checkpoint_every": 2})
    settings = config.model_copy(update={"training": training})
    for step in range(3):
        record_batch(coordinator, step)
    good = record_batch(coordinator, 1, groups=1).model_copy(update={"attempt": 1})
    record_batch(coordinator, 1, verified=True)  # its log-probabilities are far from the policy's
    coordinator.audited_batches = [good]
    service = start(settings, metrics=(metrics := EventLog()))
    assert service.run()
    assert [(body.step, body.attempt) for body in coordinator.recall] == [(1, 0)]
    assert "kl_behaviour of step 1" in coordinator.recall[0].reason
    assert metrics.counters["recalled"] == 1
    undone = set(published(coordinator))
    assert sorted(version for version, _ in undone) == [0, 1, 2, 3], "repeated steps give the same weights"

    coordinator.versions.clear()
    assert start(settings, root=tmp_path / "again").run()
    assert set(published(coordinator)) == undone, "a run that never saw the bad batch has the same bits"


def test_a_run_that_diverges_stops_with_the_reason_and_keeps_the_last_good_checkpoint(
    start: Start, coordinator: FakeCoordinator, config: ShoalConfig, tmp_path: Path
) -> None:
    strict = config.training.model_copy(update={"kl_limit": 0.05, "checkpoint_every": 1})
    for step in range(3):
        record_batch(coordinator, step, verified=step == 2)  # its log-probabilities are far from the policy's
    service = start(config.model_copy(update={"training": strict}), metrics=(metrics := EventLog()))
    with pytest.raises(DivergedError, match=r"kl_behaviour of step 2 is .* above the limit 0\.05"):
        service.run()
    assert [version for version, _ in published(coordinator)] == [0, 1, 2]
    assert metrics.counters["diverged"] == 1
    kept = sorted(path.name for path in (tmp_path / "trainer" / "checkpoints").iterdir())
    assert kept == ["step-00000001", "step-00000002"]
    again = start(config)
    assert again.trainer.resume()
    publish(again)
    assert published(coordinator)[-1] == published(coordinator)[-2]  # the weights of version 2, bit for bit


def test_groups_carry_the_validators_rewards_and_verified_logprobs_only(
    start: Start, coordinator: FakeCoordinator
) -> None:
    service = start()
    for verified in (False, True):
        batch = record_batch(coordinator, 0, verified=verified)
        groups: list[Group] = list(service.fetch_groups(batch))
        assert [group.group_id for group in groups] == ["0/0/0", "0/0/1"]
        assert [sample.reward for sample in groups[1].samples] == [0.9, 0.1, 0.0, -0.1]
        assert [sample.task_reward for sample in groups[1].samples] == [1.0, 0.0, 0.0, 0.0]
        assert [sample.truncated for sample in groups[0].samples] == [False, False, False, True]
        assert (groups[0].samples[0].behaviour_logprobs is not None) == verified


def test_stored_bytes_that_changed_are_refused(start: Start, coordinator: FakeCoordinator) -> None:
    batch = record_batch(coordinator, 0)
    coordinator.files["submission-0"] += b"rot"
    with pytest.raises(IntegrityError, match="submission-0"):
        list(start().fetch_groups(batch))


def test_a_group_with_fewer_rows_than_rewards_is_refused(start: Start, coordinator: FakeCoordinator) -> None:
    batch = record_batch(coordinator, 0)
    missing = batch.groups[0].model_copy(update={"group": 5})
    with pytest.raises(IntegrityError, match="0 samples, its verdict 4"):
        list(start().fetch_groups(batch.model_copy(update={"groups": [missing]})))


def test_a_batch_without_groups_publishes_the_same_weights_again(start: Start, coordinator: FakeCoordinator) -> None:
    record_batch(coordinator, 0, groups=0)
    service = start()
    publish(service)
    publish(service, service.step())
    (_, before), (version, after) = published(coordinator)
    assert (version, after) == (1, before)


def test_a_killed_trainer_repeats_a_step_without_groups_too(start: Start, coordinator: FakeCoordinator) -> None:
    for step in range(3):
        record_batch(coordinator, step, groups=0 if step == 2 else 2)
    killed = start()
    killed.run()
    lose_last_checkpoint(killed.trainer)
    first = published(coordinator)
    assert first[3][1] == first[2][1]
    coordinator.versions.clear()
    start().run()
    assert published(coordinator) == first[2:]


def test_while_the_batch_is_not_formed_it_says_what_is_missing(start: Start, coordinator: FakeCoordinator) -> None:
    reports = Reports()
    service = start(report=reports)
    record_batch(coordinator, 0)
    formed, answers = coordinator.batches[0], iter([api.BatchAnswer(waiting_for="3 of 8 useful groups")])

    def batch(step: int, wait_s: float = 20.0, epoch: int = 0) -> api.BatchAnswer:
        return next(answers, formed)

    service.client.batch = batch  # type: ignore[method-assign]
    assert service.wait_for_batch(0).step == 0
    assert reports == ["step 0 waits for 3 of 8 useful groups"]


def test_a_coordinator_that_is_away_is_waited_for(start: Start, coordinator: FakeCoordinator) -> None:
    record_batch(coordinator, 0)
    service = start(report=(reports := Reports()))
    service.client = coordinator.client(deadline_s=1500.0, on_wait=reports)
    coordinator.away["/v1/batches"] = 30
    assert service.wait_for_batch(0).step == 0
    assert reports == ["Waiting for the coordinator at http://coordinator, for up to 25 minutes: connection refused."]


def test_a_drained_run_ends_the_trainer_with_a_checkpoint(start: Start, coordinator: FakeCoordinator) -> None:
    service = start()
    record_batch(coordinator, 0)
    coordinator.batches[1] = api.BatchAnswer(run_state="drained")
    assert not service.run()
    assert service.trainer.checkpoint_steps()[-1] == 1


def test_a_killed_trainer_repeats_its_steps_bit_for_bit(start: Start, coordinator: FakeCoordinator) -> None:
    for step in range(3):
        record_batch(coordinator, step)
    killed = start(report=(said := Reports()))
    killed.run()
    lose_last_checkpoint(killed.trainer)
    first = published(coordinator)
    coordinator.versions.clear()
    assert said.some("found no checkpoint, starting at step 0")
    resumed = start(report=(said := Reports()))
    resumed.run()
    assert said.some("resumed at step 2")
    assert published(coordinator) == first[2:]  # the last checkpoint is that of step 2
    head = origin_of(resumed).head
    assert head is not None
    assert [entry.version for entry in head.versions] == [0, 1, 2, 3]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_last_version_is_always_checkpointed(
    start: Start, coordinator: FakeCoordinator, config: ShoalConfig, steps: int
) -> None:
    for step in range(steps):
        record_batch(coordinator, step)
    rare = config.training.model_copy(update={"checkpoint_every": 100})
    run = config.run.model_copy(update={"steps": steps})
    service = start(config.model_copy(update={"training": rare, "run": run}))
    assert service.run()
    assert service.trainer.checkpoint_steps()[-1] == steps


def test_the_last_version_is_announced_after_its_checkpoint_is_on_disk(
    start: Start, coordinator: FakeCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A swarm that ends with the last version stops its trainer, which must not be writing then."""
    for step in range(3):
        record_batch(coordinator, step)
    service, written = start(), []
    announce = origin_of(service).announce

    def look(ledger_head: str) -> object:
        written.append((tmp_path / "trainer" / "checkpoints" / "step-00000003").exists())
        return announce(ledger_head=ledger_head)

    monkeypatch.setattr(origin_of(service), "announce", look)
    assert service.run()
    assert written == [False, False, False, True]


def test_weights_that_the_swarm_does_not_have_never_become_the_last_checkpoint(
    start: Start, coordinator: FakeCoordinator
) -> None:
    for step in range(3):
        record_batch(coordinator, step)
    coordinator.refusals["/v1/versions"] = Refuse("version_conflict", status=409)
    service = start()
    while service.trainer.step < 3:
        service.step()
    with pytest.raises(RepeatedStepError):
        publish(service)
    service.trainer.close()
    assert service.trainer.checkpoint_steps() == []


def test_a_full_disk_stops_the_trainer_with_a_sentence_and_costs_no_step(
    start: Start, coordinator: FakeCoordinator, tiny_disk: TinyDisk
) -> None:
    for step in range(3):
        record_batch(coordinator, step)
    start().run()
    undisturbed = published(coordinator)
    coordinator.versions.clear()
    tiny_disk.fill()
    with pytest.raises(OSError, match="No space left"):
        start(root=tiny_disk.root).run()
    tiny_disk.make_room()
    service = start(root=tiny_disk.root)
    publish(service)
    service.step()
    tiny_disk.fill()
    with contextlib.suppress(OSError):
        service.trainer.save()
    with contextlib.suppress(CheckpointError):
        service.trainer.close()
    assert service.trainer.checkpoint_steps() == []
    tiny_disk.make_room()
    assert start(root=tiny_disk.root).run()
    assert sorted(set(published(coordinator))) == undisturbed


def test_versions_that_nobody_can_fetch_any_more_are_not_published_again(
    start: Start, coordinator: FakeCoordinator, config: ShoalConfig
) -> None:
    # Only the checkpoint of step 0 exists, and the origin has forgotten the first versions.
    rare = config.model_copy(update={"training": config.training.model_copy(update={"checkpoint_every": 100})})
    for step in range(3):
        record_batch(coordinator, step)
    killed = start(rare, keep_versions=2)
    killed.run()
    lose_last_checkpoint(killed.trainer)
    first = published(coordinator)
    coordinator.versions.clear()
    start(rare, keep_versions=2).run()
    assert published(coordinator) == first[2:]


def test_other_bytes_under_a_published_number_are_refused(start: Start, coordinator: FakeCoordinator) -> None:
    record_batch(coordinator, 0)
    service = start()
    publish(service)
    other = [replace(tensor, data=bytes(memoryview(tensor.data).nbytes)) for tensor in service.trainer.wire_tensors()]
    service.trainer.snapshot = lambda: Snapshot(lambda: other)  # type: ignore[method-assign]
    with pytest.raises(RepeatedStepError, match=r"Version 0 is already published.*\[training\]") as refused:
        publish(service)
    assert refused.value.code == "repeated_step"


def test_a_rank_without_an_origin_only_takes_part_in_gathering(start: Start, coordinator: FakeCoordinator) -> None:
    service = start()
    service.publisher = None
    assert service.publish() is None
    assert coordinator.versions == []
