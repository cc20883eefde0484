"""A run directory from a backup: whole or not at all, never over another one.

Every file is hashed before it counts. The restored run says so in its ledger, and its next head is newer than any that was ever
seen, so that nobody takes it for a replayed old one.
"""

import contextlib
import os
import shutil
import tarfile
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ValidationError

from shoal.broadcast.manifest import seal_head
from shoal.config import to_toml
from shoal.coordinator import Store, ledger
from shoal.errors import ConfigError, IntegrityError
from shoal.files import digest_file, write_atomic
from shoal.metrics import Report
from shoal.owner.backup import INDEX_NAME, BackupError, Index, head_of, kept_rollouts, staged
from shoal.owner.bucket import BucketRollouts
from shoal.protocol.signing import restored_message
from shoal.rundir import RunDirectory, located

COUNTER_LEAP = 1 << 20
"""Workers that have seen a newer head than the restored one must still take the next head as new."""


def restore_backup(
    backup: Path,
    report: Report,
    *,
    target: Path | None = None,
    files: Path | None = None,
    clock: Callable[[], float] = time.time,
) -> RunDirectory:
    """Makes a run directory from a backup; `files` is a run directory that has what the backup only names."""
    with _opened(backup) as archive:
        index = _read_index(archive, backup)
        target = (target or _recorded_place(archive, backup)).absolute()
        _check_empty(target)
        with staged(target.parent, f"restore-{target.name}") as staging:
            copy = RunDirectory(staging / "run")
            _extract(archive, index, copy.root, backup)
            _add_left_out(index, copy.root, files)
            _return_rollouts(copy, report)
            _make_current(copy, target, index, clock())
            os.replace(copy.root, target)
    report(f"restored {index.run_id} at step {index.step}, version {index.newest_version}, in {target}")
    return RunDirectory(target)


@contextlib.contextmanager
def _opened(backup: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(backup, "r:") as archive:
            yield archive
    except FileNotFoundError as error:
        if error.filename is not None and Path(error.filename) == backup.absolute():
            raise BackupError(f"There is no backup {backup}.") from None
        raise
    except tarfile.TarError as error:
        raise BackupError(f"{backup} is damaged or no backup of a run: {error}.") from None


def _read_index(archive: tarfile.TarFile, backup: Path) -> Index:
    try:
        return Index.model_validate_json(_read_member(archive, INDEX_NAME))
    except (KeyError, ValidationError):
        raise BackupError(f"{backup} is damaged or no backup of a run.") from None


def _read_member(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(name)
    if member is None:
        raise KeyError(name)
    return member.read()


def _recorded_place(archive: tarfile.TarFile, backup: Path) -> Path:
    try:
        return Path(tomllib.loads(_read_member(archive, "run.toml").decode())["run"]["dir"])
    except (KeyError, ValueError):
        raise BackupError(f"{backup} does not say where the run was.", hint="Name a place with --to.") from None


def _extract(archive: tarfile.TarFile, index: Index, root: Path, backup: Path) -> None:
    for name, digest in index.files.items():
        try:
            archive.extract(name, root, filter="data")
        except KeyError:
            raise BackupError(f"{backup} lacks {name}: it is truncated.") from None
        if digest_file(root / name) != digest:
            raise IntegrityError(f"{name} in {backup} is not what was backed up.", hint="Use another backup.")


def _add_left_out(index: Index, root: Path, files: Path | None) -> None:
    if index.left_out and files is None:
        raise ConfigError(
            f"This backup only names {len(index.left_out)} large files.",
            hint="Name a directory that has them with --files, such as the old run directory or a mirror of it.",
        )
    for name, digest in index.left_out.items():
        assert files is not None
        source = files / name
        if not source.is_file() or digest_file(source) != digest:
            raise IntegrityError(f"{source} is missing or not the file that the backup names.")
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, root / name)


def _return_rollouts(copy: RunDirectory, report: Report) -> None:
    """A run with a bucket finds its rollouts there, whatever it has forgotten since the backup."""
    bucket = BucketRollouts.of(copy.config().coordinator)
    if bucket is not None and copy.store.exists():
        sent = bucket.put_back(copy.submissions, kept_rollouts(copy))
        report(f"{sent} rollout files were put back into the bucket")
        shutil.rmtree(copy.submissions, ignore_errors=True)


def _check_empty(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BackupError(f"{target} exists.", hint="A restore never overwrites; choose another place with --to.")


def _make_current(copy: RunDirectory, target: Path, index: Index, now: float) -> None:
    """The restored run says so in its ledger, and its next head is newer than any that was ever seen."""
    write_atomic(copy.run_file, to_toml(located(copy.config(), target)).encode())
    run_key = copy.existing_key("run")
    head = head_of(copy)
    if head is not None:
        leapt = head.model_copy(update={"counter": head.counter + COUNTER_LEAP})
        write_atomic(copy.origin / "head.json", seal_head(leapt, run_key))
    if copy.store.exists():
        store = Store(copy.store)
        keypair = copy.existing_key("coordinator")
        facts: dict[str, object] = {
            "entries": index.ledger_entries,
            "head": index.ledger_head,
            "backup_made_at": index.made_at,
            "restored_at": now,
        }
        signature = run_key.sign(restored_message(index.run_id, facts))
        store.write(
            lambda connection: ledger.append(connection, keypair, now, "restored", **facts, signature=signature)
        )
        store.close()
