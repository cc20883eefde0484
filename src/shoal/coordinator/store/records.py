"""What other packages read from the store of a run: opened, typed, without SQL of their own."""

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.coordinator.states import GroupState
from shoal.coordinator.store.database import Connection, is_shared, open_database
from shoal.coordinator.store.rows import find, query, select
from shoal.coordinator.store.tables import GroupRow, LeaseRow, SubmissionRow, WorkerRow
from shoal.coordinator.store.writer import Store
from shoal.errors import ConfigError
from shoal.rundir import RunDirectory


@dataclass(frozen=True)
class KeptRollout:
    """A rollout file that retention has not deleted."""

    submission_id: str
    digest: str
    size_bytes: int

    @property
    def file_name(self) -> str:
        return f"{self.submission_id}.parquet"


@dataclass(frozen=True)
class VerifiedGroup:
    """A group with the rewards that a validator computed, and the file that holds it."""

    submission_id: str
    digest: str
    number: int
    task_rewards: str


@contextlib.contextmanager
def open_store(directory: RunDirectory, *, create: bool = False) -> Iterator[Store]:
    """The store of a run, whether its coordinator runs or not."""
    if not create and not has_store(directory):
        raise ConfigError(
            f"{directory.root} has no coordinator's store.", hint="Run this on the host of the coordinator."
        )
    store = Store(open_database(directory.config().coordinator.store, directory.store))
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def open_copy(path: Path) -> Iterator[Connection]:
    """A file that was copied from a store, for reading; nothing is migrated or written."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        yield connection


def copy_store(source: Path, target: Path) -> None:
    """A consistent copy of a store that may be in use."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        contextlib.closing(sqlite3.connect(source, timeout=30)) as live,
        contextlib.closing(sqlite3.connect(target)) as copied,
    ):
        live.backup(copied)
        copied.execute("PRAGMA journal_mode=DELETE")


def has_store(directory: RunDirectory) -> bool:
    return is_shared(directory.config().coordinator.store) or directory.store.exists()


def worker_names(connection: Connection) -> dict[str, str]:
    return {row.key: row.name for row in select(connection, WorkerRow)}


def submissions(connection: Connection) -> list[SubmissionRow]:
    """In the order of their arrival."""
    return select(connection, SubmissionRow, "ORDER BY received_at")


def lease_of_file(connection: Connection, submission_id: str) -> LeaseRow | None:
    """The lease that a submission answers."""
    return find(connection, LeaseRow, "JOIN submissions USING (lease_id) WHERE submission_id=?", (submission_id,))


def groups(connection: Connection) -> list[GroupRow]:
    return select(connection, GroupRow, "ORDER BY step, slot, number")


def kept_rollouts(connection: Connection) -> list[KeptRollout]:
    sql = "SELECT submission_id, digest, size_bytes FROM submissions WHERE collected_at IS NULL"
    return query(connection, KeptRollout, sql)


def verified_groups(connection: Connection) -> list[VerifiedGroup]:
    """Accepted groups that were not withdrawn, in slot order."""
    return query(
        connection,
        VerifiedGroup,
        "SELECT submission_id, digest, number, task_rewards FROM groups JOIN submissions USING (submission_id)"
        f" WHERE groups.state <> '{GroupState.WITHDRAWN}' ORDER BY groups.step, groups.slot, number",
    )
