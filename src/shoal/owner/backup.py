"""One file from which a run continues: keys, descriptor, settings, the store, rollouts, weights and the newest checkpoint.

A backup of a live run is consistent: checkpoint and head are taken first, then the store by SQLite's online backup; if a version
was published in between, it is taken again. Checkpoint ≤ head = store, so the trainer repeats recorded batches and nothing else.
Large files may be left out: the backup then names them by digest. It holds private keys: it is written for its owner's eyes only.
"""

import contextlib
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from shoal.broadcast.manifest import Head, Manifest, open_head, open_manifest
from shoal.broadcast.retention import needed_manifests
from shoal.coordinator import ledger
from shoal.coordinator.batching import steps
from shoal.coordinator.store import records
from shoal.coordinator.store.records import KeptRollout
from shoal.errors import ShoalError, UnavailableError
from shoal.files import TEMPORARY_PREFIX, Digest, atomic_file, digest_file, write_atomic
from shoal.locks import hold
from shoal.metrics import Report
from shoal.owner.bucket import BucketRollouts
from shoal.rundir import RunDirectory, checkpoint_path, checkpoint_steps

INDEX_NAME = "backup.json"
TRIES = 8
PAUSE_S = 0.5
LARGE = ("trainer/", "origin/shards/", "coordinator/submissions/")


class BackupError(ShoalError):
    """A backup that cannot be made or used."""

    code = "backup"
    permanent = False


class _ChangedError(Exception):
    """The run moved on while it was being copied."""


class Index(BaseModel):
    """What a backup holds, and what it only names."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal[1] = 1
    run_id: str
    made_at: float
    step: int
    newest_version: int
    checkpoint: int | None
    ledger_entries: int
    ledger_head: str
    files: dict[str, Digest]
    """Path in the run directory → digest, of the files inside."""
    left_out: dict[str, Digest] = {}


def write_backup(
    directory: RunDirectory,
    output: Path,
    report: Report,
    *,
    references_only: bool = False,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Index:
    """Writes the backup of a run, live or not; `references_only` leaves weights, rollouts and checkpoint out."""
    if output.exists():
        raise BackupError(f"{output} exists.", hint="Choose another name; backups are never overwritten.")
    if directory.config().coordinator.store != "sqlite":
        raise BackupError("The store of this run is a PostgreSQL database.", hint="Back it up with pg_dump.")
    busy = f"Another backup of {directory.root} is being made."
    with hold(directory.root / "backup.lock", busy), staged(directory.root, "backup") as staging:
        copy = _take_until_consistent(directory, staging, sleep, references_only)
        index = _index(copy, clock(), references_only)
        write_atomic(copy.root / INDEX_NAME, index.model_dump_json(indent=2).encode())
        report(f"writing {len(index.files)} files of step {index.step}, version {index.newest_version}")
        _write_tar(copy.root, [INDEX_NAME, *index.files], output)
    return index


def _take_until_consistent(
    directory: RunDirectory, staging: Path, sleep: Callable[[float], None], references_only: bool
) -> RunDirectory:
    for attempt in range(TRIES):
        copy = RunDirectory(staging / str(attempt))
        try:
            _take(directory, copy, references_only)
            return copy
        except (_ChangedError, FileNotFoundError, shutil.Error) as error:
            why = str(error)
            shutil.rmtree(copy.root, ignore_errors=True)
            sleep(PAUSE_S)
    raise UnavailableError(
        f"The run changed faster than it could be copied, {TRIES} times in a row ({why}).",
        hint="Pause it (`shoal run pause`) and try again.",
    )


def _take(run: RunDirectory, copy: RunDirectory, references_only: bool) -> None:
    """Links or copies everything, in the order that makes it consistent."""
    for name in ("run.toml", "descriptor.json", "keys"):
        _link(run.root / name, copy.root / name)
    checkpoint = newest_checkpoint(run)
    if checkpoint is not None:
        path = checkpoint_path(run.checkpoints, checkpoint)
        _link(path, copy.root / path.relative_to(run.root))
    _link(run.origin / "descriptor.json", copy.origin / "descriptor.json")
    if (run.origin / "head.json").exists():
        _link(run.origin / "head.json", copy.origin / "head.json")
    head = head_of(copy)
    if head is not None:
        _link_weights(run, copy, head)
    if run.store.exists():
        records.copy_store(run.store, copy.store)
        _check(copy, head, checkpoint)
        _take_rollouts(run, copy, references_only)


def _check(copy: RunDirectory, head: Head | None, checkpoint: int | None) -> None:
    with records.open_copy(copy.store) as connection:
        if head is not None and head.epoch != steps.epoch(connection):
            raise BackupError("The run was rewound.", hint="Start its trainer once; then it can be backed up.")
        newest = steps.newest_version(connection)
        announced = head.newest.version if head is not None and head.newest is not None else -1
        if newest != announced or (checkpoint or 0) > max(newest, 0):
            raise _ChangedError(f"version {newest} is recorded, {announced} announced")


def _take_rollouts(run: RunDirectory, copy: RunDirectory, references_only: bool) -> None:
    """Links them, or copies them out of the bucket; one that is only named stays there."""
    bucket = BucketRollouts.of(run.config().coordinator)
    if bucket is None:
        for rollout in kept_rollouts(copy):
            _link(run.submissions / rollout.file_name, copy.submissions / rollout.file_name)
    elif not references_only:
        bucket.copy_to(copy.submissions, kept_rollouts(copy))


def kept_rollouts(copy: RunDirectory) -> list[KeptRollout]:
    with records.open_copy(copy.store) as connection:
        return records.kept_rollouts(connection)


def _link_weights(run: RunDirectory, copy: RunDirectory, head: Head) -> None:
    run_key = run.descriptor().run_key

    def load(digest: str) -> Manifest:
        return open_manifest((run.origin / "manifests" / digest).read_bytes(), run_key)

    manifests = needed_manifests((entry.manifest_digest for entry in head.versions), load)
    shards = {shard.digest for manifest in manifests.values() for shard in manifest.shards}
    for digest in manifests:
        _link(run.origin / "manifests" / digest, copy.origin / "manifests" / digest)
    for digest in shards | {file.digest for file in head.files}:
        _link(run.origin / "shards" / digest, copy.origin / "shards" / digest)


def newest_checkpoint(run: RunDirectory) -> int | None:
    return max(checkpoint_steps(run.checkpoints), default=None)


def head_of(run: RunDirectory) -> Head | None:
    path = run.origin / "head.json"
    return open_head(path.read_bytes(), run.descriptor().run_key) if path.exists() else None


def _link(source: Path, target: Path) -> None:
    """The same bytes under another name; whole trees too. Files of a run are replaced, never rewritten."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, copy_function=_link_file)
    else:
        _link_file(source, target)


def _link_file(source: Path | str, target: Path | str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # not every file system knows links
        shutil.copy2(source, target)


def _index(copy: RunDirectory, made_at: float, references_only: bool) -> Index:
    paths = sorted(path for path in copy.root.rglob("*") if path.is_file())
    digests = {str(path.relative_to(copy.root)): digest_file(path) for path in paths}
    left_out = {name: digest for name, digest in digests.items() if references_only and name.startswith(LARGE)}
    entries, last, step, version = 0, ledger.GENESIS, 0, -1
    if copy.store.exists():
        with records.open_copy(copy.store) as connection:
            entries, last = ledger.head(connection)
            step, version = steps.current_step(connection), steps.newest_version(connection)
    return Index(
        run_id=copy.descriptor().run_id,
        made_at=made_at,
        step=step,
        newest_version=version,
        checkpoint=newest_checkpoint(copy),
        ledger_entries=entries,
        ledger_head=last,
        files={name: digest for name, digest in digests.items() if name not in left_out},
        left_out=left_out,
    )


def _write_tar(root: Path, names: Iterable[str], output: Path) -> None:
    """An archive that only its owner may read: it holds the run's keys."""
    with atomic_file(output, mode=0o600) as file, tarfile.open(fileobj=file, mode="w") as archive:
        for name in names:
            archive.add(root / name, name, recursive=False)


@contextlib.contextmanager
def staged(parent: Path, purpose: str) -> Iterator[Path]:
    """A directory on the same disk; what a killed command left there is removed first."""
    parent.mkdir(parents=True, exist_ok=True)
    prefix = f"{TEMPORARY_PREFIX}{purpose}-"
    for leftover in parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
