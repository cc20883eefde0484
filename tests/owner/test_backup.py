"""A backup of a run, live or not, is whole; a restored run is the same run, and says that it was restored."""

import json
import os
import shutil
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.broadcast import Origin, OriginSettings
from shoal.broadcast.manifest import WireTensor, open_head
from shoal.config import build_config
from shoal.coordinator import Store, ledger
from shoal.coordinator.batching.steps import publish
from shoal.coordinator.ledger.verification import Verification, verify_ledger
from shoal.coordinator.server import begin, build_run
from shoal.coordinator.states import BatchState
from shoal.coordinator.store import records
from shoal.coordinator.store.rows import insert, update
from shoal.coordinator.store.tables import BatchRow, SubmissionRow
from shoal.errors import ConfigError, IntegrityError, UnavailableError
from shoal.locks import BusyError, hold
from shoal.owner import backup as backups
from shoal.owner.backup import BackupError, write_backup
from shoal.owner.create import initialise
from shoal.owner.restore import restore_backup
from shoal.protocol import api
from shoal.rundir import RunDirectory

NOW = 1_700_000_000.0
ROLLOUT = "ab" * 16


def publish_version(directory: RunDirectory, version: int) -> None:
    """What a trainer does: stage, record, announce."""
    run = build_run(directory)
    origin = Origin(directory.origin, directory.existing_key("run"), OriginSettings(run_id=run.descriptor.run_id))
    staged = origin.stage(version, [WireTensor("w", "float32", (4,), bytes([version]) * 16)])
    body = api.VersionBody(
        version=version,
        manifest_digest=staged.manifest_digest,
        weights_digest=staged.weights_digest,
        bytes_total=staged.follow_bytes,
    )
    store = Store(directory.store)
    batch = BatchRow(version - 1, 0.0, 0, 0, "{}", "{}")
    store.write(lambda connection: insert(connection, batch, unless_known=True))
    store.write(lambda connection: update(connection, batch, state=BatchState.RECORDED))
    store.write(lambda connection: publish(connection, run, body))
    head = store.read(ledger.head)[1]
    store.close()
    origin.announce(ledger_head=head)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    root = tmp_path_factory.mktemp("backups")
    directory = initialise(
        build_config({"run": {"dir": root / "run", "seed": 1}, "tasks": {"count": 10, "heldout": 2}})
    )
    run = build_run(directory)
    store = Store(directory.store)
    store.write(lambda connection: begin(connection, run))
    rollout = SubmissionRow(ROLLOUT, "l", "w", "d", 1, "s", 0.0, "[]", 0, 1.0, "")
    store.write(lambda connection: insert(connection, rollout))
    store.close()
    (directory.submissions / f"{ROLLOUT}.parquet").write_bytes(b"rollouts")
    for version in (0, 1):
        publish_version(directory, version)
    checkpoint = directory.trainer / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer.json").write_text('{"step": 1}')
    return directory


@pytest.fixture
def run(made: RunDirectory, tmp_path: Path) -> RunDirectory:
    shutil.copytree(made.root, tmp_path / "run")
    return RunDirectory(tmp_path / "run")


def back_up(run: RunDirectory, output: Path, **options: bool) -> backups.Index:
    return write_backup(run, output, lambda text: None, clock=lambda: NOW, sleep=lambda seconds: None, **options)


def restore(backup: Path, **places: Path) -> RunDirectory:
    return restore_backup(backup, lambda text: None, clock=lambda: NOW + 5, **places)


def entries(run: RunDirectory) -> list[dict[str, object]]:
    store = Store(run.store)
    lines = store.read(lambda connection: ledger.page(connection, 0, 1000))
    store.close()
    return [json.loads(line) for line in lines]


def verified(run: RunDirectory) -> Verification:
    store = Store(run.store)
    extent = store.read(ledger.whole)
    lines = store.read(lambda connection: ledger.page(connection, 0, extent.entries))
    store.close()
    seal = ledger.seal(run.existing_key("coordinator"), run.descriptor().run_id, extent, NOW)
    return verify_ledger([*lines, seal], run.descriptor().coordinator_key, run_key=run.descriptor().run_key)


def test_a_restored_run_has_everything_and_says_that_it_was_restored(run: RunDirectory, tmp_path: Path) -> None:
    index = back_up(run, tmp_path / "backup.tar")
    assert (index.newest_version, index.step, index.checkpoint) == (1, 1, 1)
    before = entries(run)
    restored = restore(tmp_path / "backup.tar", target=tmp_path / "elsewhere" / "new")
    assert restored.config().run.dir == tmp_path / "elsewhere" / "new"
    assert restored.descriptor() == run.descriptor()
    assert restored.secret() == run.secret()
    assert restored.role_keys() == run.role_keys()
    assert (restored.submissions / f"{ROLLOUT}.parquet").read_bytes() == b"rollouts"
    assert (restored.trainer / "checkpoints" / "step-00000001" / "trainer.json").exists()
    after = entries(restored)
    assert after[:-1] == before
    assert after[-1]["kind"] == "restored"
    assert not [one for one in verified(restored).findings if one.entry == len(before)], "the owner's key signed it"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp-")] == []


def test_a_restored_run_publishes_on_and_nobody_takes_its_head_for_an_old_one(
    run: RunDirectory, tmp_path: Path
) -> None:
    back_up(run, tmp_path / "backup.tar")
    publish_version(run, 2)
    seen = open_head((run.origin / "head.json").read_bytes(), run.descriptor().run_key)
    restored = restore(tmp_path / "backup.tar", target=tmp_path / "new")
    publish_version(restored, 2)
    head = open_head((restored.origin / "head.json").read_bytes(), run.descriptor().run_key)
    assert [entry.version for entry in head.versions] == [0, 1, 2]
    assert head.counter > seen.counter


def test_a_backup_is_for_the_owners_eyes_only_and_never_overwrites(run: RunDirectory, tmp_path: Path) -> None:
    back_up(run, tmp_path / "backup.tar")
    assert stat.S_IMODE((tmp_path / "backup.tar").stat().st_mode) == 0o600
    with pytest.raises(BackupError, match="never overwritten"):
        back_up(run, tmp_path / "backup.tar")


def test_a_restore_never_overwrites(run: RunDirectory, tmp_path: Path) -> None:
    back_up(run, tmp_path / "backup.tar")
    with pytest.raises(BackupError, match=r"exists\. A restore never overwrites"):
        restore(tmp_path / "backup.tar", target=run.root)
    assert entries(run)[-1]["kind"] == "version"


def test_without_a_place_the_run_returns_to_where_it_was(made: RunDirectory, run: RunDirectory, tmp_path: Path) -> None:
    back_up(run, tmp_path / "backup.tar")
    with pytest.raises(BackupError, match=str(made.root)):
        restore(tmp_path / "backup.tar")


def test_a_version_that_is_published_meanwhile_makes_it_start_again(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_store: Callable[[Path, Path], None] = records.copy_store
    copies: list[Path] = []

    def copy_slowly(source: Path, target: Path) -> None:
        if not copies:
            publish_version(run, 2)
        copies.append(target)
        copy_store(source, target)

    monkeypatch.setattr(records, "copy_store", copy_slowly)
    assert back_up(run, tmp_path / "backup.tar").newest_version == 2
    assert len(copies) == 2


def test_a_run_that_never_holds_still_is_refused_with_the_way_out(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = iter(range(2, 100))

    def copy_store(source: Path, target: Path) -> None:
        publish_version(run, next(versions))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)

    monkeypatch.setattr(records, "copy_store", copy_store)
    with pytest.raises(UnavailableError, match="shoal run pause"):
        back_up(run, tmp_path / "backup.tar")
    assert not (tmp_path / "backup.tar").exists()
    assert not list(run.root.glob(".tmp-*"))


def test_a_file_that_retention_removes_meanwhile_makes_it_start_again(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link
    tries: list[Path] = []

    def vanish_once(source: Path, target: Path) -> None:
        if Path(source).suffix == ".parquet" and not tries:
            tries.append(source)
            raise FileNotFoundError(source)
        link(source, target)

    monkeypatch.setattr(os, "link", vanish_once)
    back_up(run, tmp_path / "backup.tar")
    assert len(tries) == 1


def test_large_files_may_be_left_out_and_are_taken_from_a_mirror(run: RunDirectory, tmp_path: Path) -> None:
    index = back_up(run, tmp_path / "backup.tar", references_only=True)
    large = {name.split("/")[0] for name in index.left_out}
    assert large == {"coordinator", "origin", "trainer"}
    with pytest.raises(ConfigError, match="--files"):
        restore(tmp_path / "backup.tar", target=tmp_path / "new")
    restored = restore(tmp_path / "backup.tar", target=tmp_path / "new", files=run.root)
    assert (restored.submissions / f"{ROLLOUT}.parquet").read_bytes() == b"rollouts"
    (run.submissions / f"{ROLLOUT}.parquet").write_bytes(b"changed!")
    with pytest.raises(IntegrityError, match="not the file that the backup names"):
        restore(tmp_path / "backup.tar", target=tmp_path / "other", files=run.root)
    assert not (tmp_path / "other").exists()


def test_a_damaged_backup_is_refused_and_leaves_nothing(run: RunDirectory, tmp_path: Path) -> None:
    back_up(run, tmp_path / "backup.tar")
    data = bytearray((tmp_path / "backup.tar").read_bytes())
    at = data.rindex(b"rollouts")
    data[at] ^= 1
    (tmp_path / "damaged.tar").write_bytes(data)
    with pytest.raises(IntegrityError, match="is not what was backed up"):
        restore(tmp_path / "damaged.tar", target=tmp_path / "new")
    (tmp_path / "cut.tar").write_bytes(data[: len(data) // 3])
    with pytest.raises(BackupError, match=r"truncated|damaged"):
        restore(tmp_path / "cut.tar", target=tmp_path / "new")
    (tmp_path / "text.tar").write_text("no archive")
    with pytest.raises(BackupError, match="damaged or no backup"):
        restore(tmp_path / "text.tar", target=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_backup_cannot_write_outside_its_place(run: RunDirectory, tmp_path: Path) -> None:
    index = back_up(run, tmp_path / "backup.tar")
    evil = index.model_copy(update={"files": {"../evil": "0" * 64}})
    with tarfile.open(tmp_path / "evil.tar", "w") as archive:
        for name, text in ((backups.INDEX_NAME, evil.model_dump_json()), ("../evil", "x"), ("run.toml", "")):
            (tmp_path / "member").write_text(text)
            archive.add(tmp_path / "member", name)
    with pytest.raises(BackupError):
        restore(tmp_path / "evil.tar", target=tmp_path / "new" / "run")
    assert not list(tmp_path.rglob("evil"))


def test_two_backups_do_not_disturb_each_other(run: RunDirectory, tmp_path: Path) -> None:
    with hold(run.root / "backup.lock", ""), pytest.raises(BusyError, match="Another backup"):
        back_up(run, tmp_path / "backup.tar")


def test_a_missing_backup_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BackupError, match="There is no backup"):
        restore(tmp_path / "none.tar", target=tmp_path / "new")
