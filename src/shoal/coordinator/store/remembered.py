"""What many requests read and few changes touch: read again after a commit only.

Where other processes write too, nothing is remembered.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import Record, find
from shoal.coordinator.store.tables import WorkerRow
from shoal.coordinator.store.writer import Store

Result = TypeVar("Result")

MOST_ROWS = 65_536


class Remembered(Generic[Result]):
    def __init__(self, store: Store, read: Callable[[Connection], Result]) -> None:
        self._store, self._read = store, read
        self._newest: tuple[int, Result] | None = None

    def value(self, connection: Connection) -> Result:
        if self._store.database.is_shared:
            return self._read(connection)
        commits = self._store.commits  # before reading: what is committed meanwhile is read once more
        if self._newest is None or self._newest[0] != commits:
            self._newest = commits, self._read(connection)
        return self._newest[1]


class RememberedWorkers:
    """Rows of workers by key, for requests that come far more often than a row changes. Used by one thread, the loop's.

    A row that is read while a commit is under way is not kept, and a commit forgets the rows that it changed, so what is kept is
    what the store holds.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: dict[str, WorkerRow] = {}
        store.on_row_change(self._forget)

    def find(self, connection: Connection, key: str) -> WorkerRow | None:
        known = self._rows.get(key)
        if known is not None:
            return known
        commits = self._store.commits
        row = find(connection, WorkerRow, "WHERE key=?", (key,))
        if row is not None and self._store.commits == commits and not self._store.database.is_shared:
            if len(self._rows) >= MOST_ROWS:
                self._rows.clear()
            self._rows[key] = row
        return row

    def _forget(self, row: Record) -> None:
        if isinstance(row, WorkerRow):
            self._rows.pop(row.key, None)
