"""The coordinator's memory: one schema, one writer, durable in groups.

`write(work)` runs a function on the writer's connection inside a transaction and returns when it is on disk. Waiting writes
share one commit, each inside its own savepoint, so that a refused one leaves no trace and a busy coordinator syncs once per
few milliseconds, not once per request. `read(work)` sees one committed state, whatever is written meanwhile.
"""

import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from shoal.errors import ShoalError

Result = TypeVar("Result")
Work = Callable[[sqlite3.Connection], Result]

SCHEMA_VERSION = 2
LARGEST_GROUP = 256

SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE workers (
  key TEXT PRIMARY KEY, name TEXT NOT NULL, engine TEXT NOT NULL, numerics_class TEXT NOT NULL,
  tokens_per_s REAL NOT NULL, registered_at REAL NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '',
  clean_audits INTEGER NOT NULL DEFAULT 0, anomalies INTEGER NOT NULL DEFAULT 0, drift REAL NOT NULL DEFAULT 0,
  accepted INTEGER NOT NULL DEFAULT 0, rejected INTEGER NOT NULL DEFAULT 0,
  credit_held INTEGER NOT NULL DEFAULT 0, credit_released INTEGER NOT NULL DEFAULT 0, banned_at REAL);
CREATE INDEX workers_by_state ON workers (state, key);
CREATE TABLE nonces (key TEXT NOT NULL, nonce TEXT NOT NULL, expires_at REAL NOT NULL, PRIMARY KEY (key, nonce)) WITHOUT ROWID;
CREATE INDEX nonces_by_expiry ON nonces (expires_at);
CREATE TABLE slots (
  step INTEGER NOT NULL, slot INTEGER NOT NULL, state TEXT NOT NULL, lease_id TEXT, attempts INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (step, slot)) WITHOUT ROWID;
CREATE INDEX slots_by_state ON slots (state, step, slot);
CREATE TABLE leases (
  lease_id TEXT PRIMARY KEY, request_id TEXT NOT NULL, worker TEXT NOT NULL, step INTEGER NOT NULL, slot INTEGER NOT NULL,
  policy_version INTEGER NOT NULL, manifest_digest TEXT NOT NULL, issued_at REAL NOT NULL, expires_at REAL NOT NULL,
  state TEXT NOT NULL, UNIQUE (worker, request_id));
CREATE INDEX leases_by_expiry ON leases (state, expires_at);
CREATE INDEX leases_by_slot ON leases (step, slot, worker);
CREATE INDEX leases_by_worker ON leases (worker, state);
CREATE TABLE submissions (
  submission_id TEXT PRIMARY KEY, lease_id TEXT NOT NULL UNIQUE, worker TEXT NOT NULL, digest TEXT NOT NULL,
  size_bytes INTEGER NOT NULL, signature TEXT NOT NULL, received_at REAL NOT NULL, audit INTEGER NOT NULL,
  state TEXT NOT NULL, claim_id TEXT, claimed_by TEXT, claim_request TEXT, claim_expires REAL, tries INTEGER NOT NULL DEFAULT 0,
  judged_at REAL, verdict TEXT);
CREATE INDEX submissions_by_state ON submissions (state, received_at);
CREATE INDEX submissions_by_worker ON submissions (worker, state);
CREATE TABLE groups (
  group_id TEXT PRIMARY KEY, submission_id TEXT NOT NULL, worker TEXT NOT NULL, step INTEGER NOT NULL, slot INTEGER NOT NULL,
  number INTEGER NOT NULL, policy_version INTEGER NOT NULL, useful INTEGER NOT NULL, tokens INTEGER NOT NULL,
  rewards TEXT NOT NULL, task_rewards TEXT NOT NULL, logprobs_verified INTEGER NOT NULL,
  state TEXT NOT NULL, batch_step INTEGER, position INTEGER);
CREATE INDEX groups_by_state ON groups (state, step, slot, number);
CREATE INDEX groups_by_batch ON groups (batch_step, position);
CREATE INDEX groups_by_submission ON groups (submission_id);
CREATE TABLE batches (
  step INTEGER PRIMARY KEY, formed_at REAL NOT NULL, groups INTEGER NOT NULL, generated INTEGER NOT NULL,
  dropped TEXT NOT NULL, ages TEXT NOT NULL);
CREATE TABLE versions (
  version INTEGER PRIMARY KEY, manifest_digest TEXT NOT NULL, weights_digest TEXT NOT NULL, bytes_total INTEGER NOT NULL,
  published_at REAL NOT NULL, report TEXT NOT NULL);
CREATE TABLE evaluations (version INTEGER PRIMARY KEY, at REAL NOT NULL, body TEXT NOT NULL);
CREATE TABLE ledger (
  seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,
  previous TEXT NOT NULL, hash TEXT NOT NULL, signature TEXT NOT NULL);
"""


class StoreError(ShoalError):
    code = "store"


class Store:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._closed = False
        self._queue: queue.SimpleQueue[tuple[Work[object], Future[object]] | None] = queue.SimpleQueue()
        self._reader_lock = threading.Lock()
        self._reader = self._connect()
        _migrate(self._reader, path)
        self._thread = threading.Thread(target=self._write_forever, name="store-writer", daemon=True)
        self._thread.start()

    def submit(self, work: Work[Result]) -> "Future[Result]":
        future: Future[Result] = Future()
        if self._closed:
            raise StoreError("The store is closed.", hint="The coordinator is stopping; try again.")
        self._queue.put((work, future))  # type: ignore[arg-type]  # the pair agrees on Result
        return future

    def write(self, work: Work[Result]) -> Result:
        return self.submit(work).result()

    def read(self, work: Work[Result]) -> Result:
        with self._reader_lock:
            try:
                self._reader.execute("BEGIN")
                try:
                    return work(self._reader)
                finally:
                    self._reader.execute("ROLLBACK")
            except sqlite3.OperationalError as error:
                raise StoreError(f"The store cannot be read: {error}.", hint="Check the disk.") from None

    def close(self) -> None:
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        with self._reader_lock:
            self._reader.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=30)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        return connection

    def _write_forever(self) -> None:
        connection = self._connect()
        try:
            while (first := self._queue.get()) is not None:
                group, closing = [first], False
                while len(group) < LARGEST_GROUP and not self._queue.empty():
                    item = self._queue.get()
                    if item is None:
                        closing = True
                        break
                    group.append(item)
                _commit_group(connection, group)
                if closing:
                    return
        finally:
            connection.close()


def _commit_group(connection: sqlite3.Connection, group: list[tuple[Work[object], "Future[object]"]]) -> None:
    # From here on nobody can cancel: a caller that went away must not break the writer that answers it.
    running = [(work, future) for work, future in group if future.set_running_or_notify_cancel()]
    outcomes: list[tuple[Future[object], object, BaseException | None]] = []
    try:
        connection.execute("BEGIN IMMEDIATE")
        for work, future in running:
            outcomes.append((future, *_run_in_savepoint(connection, work)))
        connection.execute("COMMIT")
    except Exception as error:
        _roll_back(connection)
        failure = StoreError(
            f"The store cannot be written: {error}.", hint="Check the disk; nothing of this request was kept."
        )
        for _, future in running:
            future.set_exception(failure)
        return
    for future, result, problem in outcomes:
        if problem is None:
            future.set_result(result)
        else:
            future.set_exception(problem)


def _roll_back(connection: sqlite3.Connection) -> None:
    with contextlib.suppress(sqlite3.Error):  # on a broken disk SQLite may have rolled back by itself
        connection.execute("ROLLBACK")


def _run_in_savepoint(connection: sqlite3.Connection, work: Work[object]) -> tuple[object, BaseException | None]:
    connection.execute("SAVEPOINT work")
    try:
        result = work(connection)
    except sqlite3.OperationalError:
        raise  # disk full, I/O error: the whole group fails
    except Exception as error:  # handed to the caller through its future
        connection.execute("ROLLBACK TO work")
        connection.execute("RELEASE work")
        return None, error
    connection.execute("RELEASE work")
    return result, None


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
    elif version != SCHEMA_VERSION:
        raise StoreError(
            f"{path} was written by another release (schema {version}, this one uses {SCHEMA_VERSION}).",
            hint="Use that release, or start a new run.",
        )
