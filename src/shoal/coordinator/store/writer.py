"""The coordinator's store: one schema, one writer, group commit.

`write(work)` runs a function inside a transaction and returns when it is on disk. Waiting writes share one commit, each inside
its own savepoint, so that a refused one leaves no trace and a busy coordinator syncs once per few milliseconds, not once per
request. Changes of memory wait for the commit (`Transaction.on_commit`). `read(work)` sees one committed state, whatever is
written meanwhile. A lost connection is made again; what was under way is refused and may be repeated.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from shoal.coordinator.store.database import Connection, Database, SQLite, Transaction
from shoal.coordinator.store.rows import Record
from shoal.coordinator.store.schema import migrate
from shoal.errors import ShoalError

Result = TypeVar("Result")
Work = Callable[[Transaction], Result]
Look = Callable[[Connection], Result]
Effect = Callable[[], object]
log = logging.getLogger(__name__)

LARGEST_GROUP = 256


class StoreError(ShoalError):
    """The database fails or is away."""

    code = "store"
    permanent = False


class Settled(Protocol):
    """Where a result goes: a future, or an object with the same methods."""

    def set_running_or_notify_cancel(self) -> bool: ...

    def set_result(self, result: Any, /) -> None: ...

    def set_exception(self, problem: BaseException, /) -> None: ...


@dataclass(frozen=True, slots=True)
class _Job(Generic[Result]):
    work: Work[Result]
    future: Settled
    announces: "Callable[[Result], bool] | None"


@dataclass(frozen=True, slots=True)
class _Outcome:
    result: object
    problem: BaseException | None
    effects: Sequence[Effect]
    changed: Collection[Record] = ()


class Savepoint:
    """The transaction of one write: the writer's connection, what waits for its commit, and rows that readers remember."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.effects, self.changed = connection, list[Effect](), list[Record]()
        self.execute, self.executemany, self.close = connection.execute, connection.executemany, connection.close
        self.on_commit = self.effects.append


class Store:
    def __init__(self, database: Database | Path) -> None:
        self.database: Database = SQLite(database) if isinstance(database, Path) else database
        self._closing = threading.Event()
        self._queue: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self._reader, self._row_reader = _Line(self.database), _Line(self.database)
        self._listeners: list[Callable[[], None]] = []
        self._forgetting: list[Callable[[Record], None]] = []
        self.commits = 0
        """Of this process. Counted before the callers of a group have their answers."""
        self._reader.use(lambda connection: migrate(connection, self.database))
        self._threads = [
            threading.Thread(target=self._write_forever, name="store-writer", daemon=True),
            threading.Thread(target=self._listen, name="store-listener", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def enqueue(self, work: Work[Result], future: Settled, announces: Callable[[Result], bool] | None = None) -> None:
        """Queues a change. One that `announces` notifies the listeners of every process once it is on disk."""
        if self._closing.is_set():
            raise StoreError("The store is closed.", hint="The coordinator is stopping; try again.")
        self._queue.put(_Job(work, future, announces))  # type: ignore[arg-type]  # the pair agrees on Result

    def submit(self, work: Work[Result], *, announces: Callable[[Result], bool] | None = None) -> "Future[Result]":
        future: Future[Result] = Future()
        self.enqueue(work, future, announces)
        return future

    def write(self, work: Work[Result], *, announces: Callable[[Result], bool] | None = None) -> Result:
        return self.submit(work, announces=announces).result()

    def read(self, work: Look[Result]) -> Result:
        def look(connection: Connection) -> Result:
            self.database.begin_read(connection)
            try:
                return work(connection)
            finally:
                connection.execute("ROLLBACK")

        return self._look(self._reader, look)

    def read_rows(self, work: Look[Result]) -> Result:
        """Reads a few rows, never behind a long read; each statement sees the newest committed state."""
        return self._look(self._row_reader, work)

    def _look(self, line: "_Line", work: Look[Result]) -> Result:
        try:
            return line.use(work)
        except self.database.broken as error:
            raise StoreError(f"The store cannot be read: {error}.", hint="Check the database.") from None

    def on_change(self, heard: Callable[[], None]) -> None:
        """Calls back, in a thread of the store, after each announced change."""
        self._listeners.append(heard)

    def on_row_change(self, forget: Callable[[Record], None]) -> None:
        """Calls back, in the writer's thread, with each changed row of a remembered table, before its writer has an answer."""
        self._forgetting.append(forget)

    def close(self) -> None:
        self._closing.set()
        self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._reader.close()
        self._row_reader.close()

    def _notify_listeners(self) -> None:
        for heard in list(self._listeners):
            heard()

    def _listen(self) -> None:
        self.database.listen(self._notify_listeners, self._closing)

    def _write_forever(self) -> None:
        line = _Line(self.database)
        closing = False
        while not closing and (first := self._queue.get()) is not None:
            group = [first]
            while len(group) < LARGEST_GROUP and not self._queue.empty():
                if (job := self._queue.get()) is None:
                    closing = True
                    break
                group.append(job)
            self._commit_group(line, group)
        line.close()

    def _commit_group(self, line: "_Line", group: "list[_Job[object]]") -> None:
        # From here on nobody can cancel: a caller that went away must not break the writer that answers it.
        running = [job for job in group if job.future.set_running_or_notify_cancel()]
        try:
            outcomes, announced = line.use(lambda connection: self._run_group(connection, running))
        except Exception as error:
            hint = "Check the disk or the database; nothing of this request was kept."
            failure = StoreError(f"The store cannot be written: {str(error).strip()}.", hint=hint)
            for job in running:
                job.future.set_exception(failure)
            return
        self.commits += 1
        for row in [row for outcome in outcomes for row in outcome.changed]:
            for forget in self._forgetting:
                forget(row)
        _apply_effects(outcomes)
        if announced and not self.database.is_shared:
            self._notify_listeners()
        for job, outcome in zip(running, outcomes, strict=True):
            if outcome.problem is None:
                job.future.set_result(outcome.result)
            else:
                job.future.set_exception(outcome.problem)

    def _run_group(self, connection: Connection, group: "list[_Job[object]]") -> tuple[list[_Outcome], bool]:
        self.database.begin_write(connection)
        try:
            outcomes = [_run_in_savepoint(connection, job.work, self.database.broken) for job in group]
            announced = any(_is_announced(job, outcome) for job, outcome in zip(group, outcomes, strict=True))
            if announced:
                self.database.announce(connection)
            connection.execute("COMMIT")
        except Exception:
            with contextlib.suppress(Exception):  # the database may have rolled back by itself, or be gone
                connection.execute("ROLLBACK")
            raise
        return outcomes, announced


class _Line:
    """One connection, one user at a time; made again after the database failed."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def use(self, work: Look[Result]) -> Result:
        with self._lock:
            if self._connection is None:
                self._connection = self._database.connect()
            try:
                return work(self._connection)
            except self._database.broken:
                if self._database.is_shared:
                    self._drop()
                raise

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _is_announced(job: "_Job[object]", outcome: _Outcome) -> bool:
    return outcome.problem is None and job.announces is not None and job.announces(outcome.result)


def _run_in_savepoint(connection: Connection, work: Work[object], broken: type[Exception]) -> _Outcome:
    savepoint = Savepoint(connection)
    connection.execute("SAVEPOINT work")
    try:
        result = work(savepoint)
    except broken:
        raise  # disk full, I/O error, connection lost: the whole group fails
    except Exception as error:  # handed to the caller through its future
        connection.execute("ROLLBACK TO work")
        connection.execute("RELEASE work")
        return _Outcome(None, error, ())
    connection.execute("RELEASE work")
    return _Outcome(result, None, savepoint.effects, savepoint.changed)


def _apply_effects(outcomes: Sequence[_Outcome]) -> None:
    for effect in [effect for outcome in outcomes for effect in outcome.effects]:
        try:
            effect()
        except Exception:  # the change is on disk, and the writer must go on
            log.exception("a change of memory after a commit failed")
