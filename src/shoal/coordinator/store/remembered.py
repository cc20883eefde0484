"""What many requests read and few changes touch: read again after a commit only.

Where other processes write too, nothing is remembered.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.writer import Store

Result = TypeVar("Result")


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
