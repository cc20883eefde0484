"""Retention of rollout files: those that nothing needs any more are deleted. Verdicts, groups, batches and the ledger stay.

A file is needed while its submission has no verdict, while a group of it may still enter a batch, while the trainer may have to
repeat the batch that holds it, and as evidence for as long as a verdict may be disputed. Files that no verdict accepted are kept as
evidence only while they hold a small share of the disk: the ledger names their digests for good. The database forgets first and the
file goes after the commit: a kill in between leaves a file that the next start removes, never a record without its file. A bucket
has no sweep of its own, so there the file goes first: a kill in between only makes it go twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.coordinator.batching import steps
from shoal.coordinator.rules import runs, space
from shoal.coordinator.run import Run
from shoal.coordinator.states import ENDED, UNUSED, one_of
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import number, select
from shoal.coordinator.store.tables import SubmissionRow

MOST_AT_ONCE = 256
"""Per sweep, so that a sweep stays short."""


@dataclass(frozen=True)
class Horizon:
    """Everything before it may go."""

    step: int
    """Batches of earlier steps will not be trained on again, and groups of earlier steps enter no batch."""
    decided_before: float


def horizon(connection: Connection, run: Run) -> Horizon:
    """The trainer repeats batches from its oldest checkpoint on; groups wait for a batch no longer than the asynchrony window."""
    oldest = runs.oldest_needed_step(
        steps.current_step(connection),
        run.config.training.async_level,
        min(steps.checkpoints(connection), default=0),
    )
    return Horizon(oldest, run.clock() - run.config.coordinator.keep_rollouts_s)


def collect(connection: Connection, run: Run, crowding: Sequence[str] = ()) -> list[str]:
    """Marks submissions whose files may go, those `crowding` among them; the caller removes them once this is on disk."""
    found = list(dict.fromkeys([*due(connection, run), *crowding]))
    forget(connection, run, found)
    return found


SUM = "CAST(COALESCE(SUM(size_bytes), 0) AS BIGINT)"
REFUSED = (
    f"WHERE collected_at IS NULL AND state IN {one_of(*ENDED)}"
    " AND NOT EXISTS (SELECT 1 FROM groups WHERE groups.submission_id=submissions.submission_id)"
)
"""An accepted file has groups."""
OF_STRANGERS = (
    f"SELECT {SUM} AS n FROM submissions JOIN workers ON workers.key=submissions.worker"
    " WHERE collected_at IS NULL AND (workers.accepted = 0 OR workers.state='banned')"
    " AND NOT EXISTS (SELECT 1 FROM groups WHERE groups.submission_id=submissions.submission_id)"
)


def crowding(connection: Connection, run: Run) -> list[str]:
    """Refused files, the oldest first, that hold more of the disk than evidence may."""
    free_bytes = run.known_free_bytes()
    if free_bytes is None:
        return []
    refused_bytes = number(connection, f"SELECT {SUM} AS n FROM submissions {REFUSED}")
    excess = space.refused_bytes_to_remove(free_bytes, run.min_free_bytes, refused_bytes)
    found: list[str] = []
    for row in select(connection, SubmissionRow, f"{REFUSED} ORDER BY received_at LIMIT ?", (MOST_AT_ONCE,)):
        if excess <= 0:
            break
        found.append(row.submission_id)
        excess -= row.size_bytes
    return found


def strangers_bytes(connection: Connection) -> int:
    """Of files on disk that keys without accepted work sent and that no verdict has accepted."""
    return number(connection, OF_STRANGERS)


def due(connection: Connection, run: Run) -> list[str]:
    """Submissions whose files may go; what may go once may go for ever."""
    before = horizon(connection, run)
    if before.step <= 0:
        return []
    rows = select(
        connection,
        SubmissionRow,
        f"JOIN leases USING (lease_id) WHERE collected_at IS NULL AND submissions.state IN {one_of(*ENDED)}"
        " AND COALESCE(decided_at, received_at) < ? AND leases.step < ? AND NOT EXISTS (SELECT 1 FROM groups WHERE"
        f" groups.submission_id=submissions.submission_id AND (groups.state IN {one_of(*UNUSED)}"
        " OR groups.batch_step >= ?)) ORDER BY received_at LIMIT ?",
        (before.decided_before, before.step, before.step, MOST_AT_ONCE),
    )
    return [row.submission_id for row in rows]


def forget(connection: Connection, run: Run, found: Sequence[str]) -> None:
    now = run.clock()
    connection.executemany(
        "UPDATE submissions SET collected_at=? WHERE submission_id=?", [(now, submission) for submission in found]
    )


def collected_count(connection: Connection) -> int:
    return number(connection, "SELECT COUNT(*) AS n FROM submissions WHERE collected_at IS NOT NULL")
