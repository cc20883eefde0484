"""A whole swarm whose rollouts live in a bucket: uploaded by presigned URL, read back, forgotten, backed up and restored."""

import sqlite3
from pathlib import Path

import pytest

from coordinator.store.test_bucket import OURS, needs_rclone, s3_server
from end_to_end.swarm import small_config, swarm
from shoal.files import digest_file
from shoal.owner.backup import write_backup
from shoal.owner.restore import restore_backup
from shoal.rundir import RunDirectory

ROLES = ("coordinator", "trainer", "validator")


def kept(run: RunDirectory) -> dict[str, str]:
    """File name and digest of every rollout that the store says is there."""
    with sqlite3.connect(f"file:{run.store}?mode=ro", uri=True, timeout=30) as connection:
        rows = connection.execute("SELECT submission_id, digest FROM submissions WHERE collected_at IS NULL")
        return {f"{name}.parquet": digest for name, digest in rows}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
@needs_rclone
def test_a_swarm_trains_through_a_bucket_and_a_backup_brings_back_what_it_forgot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OURS.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", OURS.secret)
    objects, backup = tmp_path / "s3" / "rollouts" / "submissions", tmp_path / "backup.tar"
    with s3_server(tmp_path / "s3") as url:
        config = small_config(
            tmp_path / "run",
            steps=100,
            training={"groups_per_step": 4, "minibatches": 1, "checkpoint_every": 1, "async_level": 1},
            coordinator={"bucket": url, "keep_rollouts_s": 1},
        )
        with swarm(config) as run:
            run.add_owner_roles(*ROLES)
            run.add_worker("anna")
            run.until("version 1", lambda status: status.newest_version >= 1)
            index = write_backup(run.directory, backup, print)
            in_backup = {Path(name).name for name in index.files if name.startswith("coordinator/submissions/")}
            assert in_backup
            run.until(
                "forgetting", lambda status: status.rollouts_collected > 0 and in_backup - names(objects) != set()
            )
            on_disk = {name for name in names(run.directory.submissions) if not name.endswith(".trace")}
            assert on_disk == set(), "the coordinator's disk holds no rollouts, only what audits of them found"
        restored = restore_backup(backup, print, target=tmp_path / "elsewhere")
        assert {name: digest_file(objects / name) for name in kept(restored)} == kept(restored)
        with swarm(restored.config()) as run:
            run.add_owner_roles(*ROLES)
            run.add_worker("bob")
            run.until("steps after the backup", lambda status: status.newest_version >= index.newest_version + 2)
