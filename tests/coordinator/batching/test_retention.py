"""Old rollout files go, needed ones stay; a full disk stops intake, loses nothing, and is recovered from."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.config import ShoalConfig
from shoal.coordinator.batching import retention
from shoal.coordinator.http import app
from shoal.coordinator.server import collect_leftovers
from shoal.coordinator.store.database import Connection
from shoal.errors import RefusedError, UnavailableError
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.verdicts import Reason
from support.swarm import Swarm, registration, running, small_config
from support.tiny_disks import TinyDisk

DISPUTE_S = 1000.0


def config(**training: object) -> ShoalConfig:
    return small_config(
        run={"steps": 30},
        training={"async_level": 2, "groups_per_step": 2, **training},
        coordinator={
            "lease_s": 60,
            "gone_after_s": 30,
            "max_upload_bytes": 10_000,
            "keep_rollouts_s": int(DISPUTE_S),
        },
    )


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with running(tmp_path, config()) as swarm:
        swarm.publish(0)
        yield swarm


class Objects:
    """A bucket of which only the removals are seen."""

    def __init__(self) -> None:
        self.deleted: set[str] = set()
        self.away = False

    async def delete(self, submission_id: str) -> None:
        if self.away:
            raise RefusedError("bucket", "The bucket does not answer.", status=503)
        self.deleted.add(submission_id)


def collect(swarm: Swarm) -> int:
    portal = swarm.http.portal
    assert portal is not None
    return int(portal.call(app.collect_rollouts, swarm.app.service))


def files(swarm: Swarm) -> set[str]:
    return {path.stem for path in swarm.run.submissions.iterdir()}


def publish(swarm: Swarm, version: int, oldest_checkpoint: int) -> None:
    digest = f"{version:064x}"
    swarm.record(version - 1)
    swarm.client("trainer").publish(
        api.VersionBody(
            version=version,
            manifest_digest=digest,
            weights_digest=digest,
            bytes_total=1,
            checkpoints=[oldest_checkpoint],
        )
    )


def play(swarm: Swarm, worker: CoordinatorClient, steps: int, *, checkpoint_behind: int = 1) -> list[str]:
    """Whole steps; returns the submission of each."""
    made = []
    for _ in range(steps):
        _, submission_id = swarm.work(worker, *range(40))
        swarm.accept()
        version = worker.status().step
        publish(swarm, version, max(0, version - checkpoint_behind))
        made.append(submission_id)
    return made


def test_files_of_trained_batches_go_after_the_asynchrony_and_the_dispute_window(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    made = play(swarm, ann, 6)
    assert collect(swarm) == 0
    swarm.clock.advance(DISPUTE_S + 1)
    assert collect(swarm) == 4
    assert files(swarm) == set(made[4:])
    assert collect(swarm) == 0
    assert ann.status().rollouts_collected == 4
    assert swarm.run.metrics.counters["rollouts_collected"] == 1
    assert len(swarm.all("SELECT 1 FROM submissions WHERE verdict IS NOT NULL")) == 6


def test_files_that_the_trainer_may_ask_for_again_stay(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    made = play(swarm, ann, 6, checkpoint_behind=5)
    swarm.clock.advance(DISPUTE_S + 1)
    assert collect(swarm) == 1
    assert files(swarm) == set(made[1:])
    trainer = swarm.client("trainer")
    for step in range(1, 6):
        batch = trainer.batch(step, wait_s=0).batch
        assert batch is not None
        for group in batch.groups:
            assert trainer.submission_file(group.submission_id, group.digest)


def test_a_trainer_that_never_wrote_a_checkpoint_needs_everything(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    play(swarm, ann, 5, checkpoint_behind=99)
    swarm.clock.advance(DISPUTE_S + 1)
    assert collect(swarm) == 0


def test_work_without_a_verdict_and_groups_that_still_wait_for_a_batch_stay(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    made = play(swarm, ann, 6)

    def make_needed(connection: Connection) -> None:
        connection.execute("UPDATE submissions SET state='claimed' WHERE submission_id=?", (made[0],))
        connection.execute(
            "UPDATE groups SET state='accepted', batch_step=NULL WHERE submission_id=? AND number=0", (made[1],)
        )

    swarm.write(make_needed)
    swarm.clock.advance(DISPUTE_S + 1)
    assert collect(swarm) == 2
    assert files(swarm) == {made[0], made[1], made[4], made[5]}


def test_evidence_against_a_cheater_goes_too_but_not_within_the_dispute_window(swarm: Swarm) -> None:
    ann, eve = swarm.join("ann", "eve")
    _, evidence = swarm.work(eve)
    swarm.reject(Reason.REWARD)
    play(swarm, ann, 5)
    assert collect(swarm) == 0
    swarm.clock.advance(DISPUTE_S + 1)
    collect(swarm)
    assert evidence not in files(swarm)


def test_a_kill_between_record_and_removal_leaves_nothing_behind(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    play(swarm, ann, 6)
    swarm.clock.advance(DISPUTE_S + 1)
    gone = swarm.write(lambda connection: retention.collect(connection, swarm.run))
    assert len(gone) == 4
    assert set(gone) <= files(swarm)
    collect_leftovers(swarm.store, swarm.run)
    assert not set(gone) & files(swarm)
    assert len(files(swarm)) == 2


def test_a_bucket_that_is_away_keeps_file_and_record_for_the_next_sweep(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    play(swarm, ann, 6)
    swarm.clock.advance(DISPUTE_S + 1)
    bucket = Objects()
    swarm.alter(bucket=bucket)
    bucket.away = True
    with pytest.raises(RefusedError):
        collect(swarm)
    assert ann.status().rollouts_collected == 0
    bucket.away = False
    assert collect(swarm) == len(bucket.deleted) == 4
    assert ann.status().rollouts_collected == 4


def test_a_full_disk_stops_intake_with_a_clear_refusal_and_recovers(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)
    floor = swarm.run.min_free_bytes
    swarm.alter(free_bytes=lambda path: floor - 1)
    assert swarm.ask(ann, 0).reason == "disk_full"
    with pytest.raises(UnavailableError, match=r"503: The coordinator's disk is full"):
        ann.submit(lease.lease_id, b"rollouts")
    assert files(swarm) == set()
    status = ann.status()
    assert (status.takes_work, status.disk_free_bytes) == (False, floor - 1)
    collect(swarm)
    assert swarm.run.metrics.counters["disk_full"] == 1

    swarm.alter(free_bytes=lambda path: floor)
    ann.submit(lease.lease_id, b"rollouts")
    swarm.accept()
    assert len(files(swarm)) == 1
    assert ann.status().takes_work


def test_an_upload_that_fills_the_disk_is_refused_and_leaves_no_file(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UnavailableError, match=r"503: The upload cannot be stored: No space left"):
            ann.submit(lease.lease_id, b"rollouts")
    assert files(swarm) == set()
    assert ann.submit(lease.lease_id, b"rollouts").state == "pending"


def register_often(worker: CoordinatorClient) -> None:
    """The database may still have a free page or two."""
    for number in range(200):
        worker.register(registration(f"name {number} " * 10))


def test_a_disk_without_a_single_byte_loses_nothing(tiny_disk: TinyDisk) -> None:
    with running(tiny_disk.root / "run", config()) as swarm:
        swarm.alter(min_free_bytes=0)
        swarm.publish(0)
        (ann,) = swarm.join("ann")
        play(swarm, ann, 2)
        lease = swarm.lease(ann)
        before, head = ann.status().step, ann.status().ledger_head
        tiny_disk.fill()
        if not swarm.run.presence.is_shared:  # a PostgreSQL has a disk of its own
            with pytest.raises(UnavailableError, match="503: The store cannot be written"):
                register_often(ann)
        with pytest.raises(UnavailableError, match="503"):
            ann.submit(lease.lease_id, bytes(9000))
        tiny_disk.make_room()
        assert ann.submit(lease.lease_id, bytes(9000)).state == "pending"
        swarm.accept()
        assert (ann.status().step, before) == (3, 2)
        assert head != ann.status().ledger_head


JUNK = bytes(9000)
DISK_BYTES = 100_000


def small_disk(swarm: Swarm) -> None:
    """As if only the rollout files were on it."""

    def left(folder: Path) -> int:
        return DISK_BYTES - sum(file.stat().st_size for file in folder.iterdir())

    swarm.alter(free_bytes=left, min_free_bytes=0)


def send_junk(swarm: Swarm, keys: int, *, named: str) -> int:
    """Each key sends one complete file; says how many were taken in before the disk was full for strangers."""
    for number in range(keys):
        (worker,) = swarm.join(f"{named}-{number}")
        lease = swarm.lease(worker)
        swarm.clock.advance(0.1)
        if not is_stored(worker, lease):
            worker.give_back(lease.lease_id)
            return number
    return keys


def is_stored(worker: CoordinatorClient, lease: api.Lease) -> bool:
    with contextlib.suppress(UnavailableError):
        worker.submit(lease.lease_id, JUNK)
        return True
    with pytest.raises(UnavailableError, match="disk is full"):
        worker.submit(lease.lease_id, JUNK)
    return False


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Swarm]:
    """A step with more slots than keys."""
    with running(tmp_path, config(groups_per_step=64)) as swarm:
        swarm.publish(0)
        yield swarm


def test_complete_junk_of_strangers_leaves_half_of_the_disk_to_keys_with_accepted_work(wide: Swarm) -> None:
    (ann,) = wide.join("ann")
    wide.produce(ann)
    small_disk(wide)
    assert send_junk(wide, 20, named="eve") == 6  # begun at 45,000 bytes, ended above half
    collect(wide)
    assert send_junk(wide, 1, named="late") == 0, "what the store knows of is counted as well"
    assert wide.work(ann)[1] in files(wide)


def test_refused_junk_makes_space_for_newcomers_long_before_the_dispute_window_ends(wide: Swarm) -> None:
    (ann,) = wide.join("ann")
    _, kept = wide.work(ann)
    wide.accept()
    small_disk(wide)
    sent = send_junk(wide, 20, named="eve")
    for _ in range(sent):
        wide.reject(Reason.SCHEMA)
    assert collect(wide) == 4
    left = files(wide)
    assert kept in left
    assert len(left) == 3, "two files are a quarter of what strangers may fill"
    assert send_junk(wide, 1, named="newcomer") == 1
    assert len(wide.all("SELECT 1 FROM ledger WHERE kind='verdict'")) == sent + 1, "every verdict stays"
    newest = [row["submission_id"] for row in wide.all("SELECT submission_id FROM submissions ORDER BY received_at")]
    assert left <= {kept, *newest[-4:]}, "the oldest went first"


def test_accepted_files_never_make_room(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    made = play(swarm, ann, 3)
    swarm.alter(free_bytes=lambda folder: 0, min_free_bytes=10)
    assert collect(swarm) == 0
    assert files(swarm) == set(made)


def test_a_file_larger_than_its_slot_can_need_is_refused_below_the_owners_limit(tmp_path: Path) -> None:
    settings = config()
    generous = settings.coordinator.model_copy(update={"max_upload_bytes": 64 << 20})
    with running(tmp_path, settings.model_copy(update={"coordinator": generous})) as swarm:
        swarm.publish(0)
        (ann,) = swarm.join("ann")
        lease, largest = swarm.lease(ann), swarm.run.largest_file_bytes
        assert largest < 1 << 20
        with pytest.raises(RefusedError) as refused:
            ann.submit(lease.lease_id, bytes(largest + 1))
        assert refused.value.code == "too_large"
        assert files(swarm) == set()
        ann.submit(lease.lease_id, bytes(largest))
