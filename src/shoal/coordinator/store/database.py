"""The two databases behind the store, seen as one: SQLite in a file by default, PostgreSQL by URL.

The coordinator writes one dialect: `?` for values, rows by column name. There is one writer at a time, in PostgreSQL across all
processes, so a transaction sees every earlier one and needs no other lock: slots are given once, the ledger is a chain. A writer
that hangs loses the writer's lock after `HANGING_AFTER_S`; one that dies loses it at once.
"""

import functools
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shoal.errors import ConfigError

if TYPE_CHECKING:
    import psycopg

WRITER_LOCK = 0x53484F414C
CHANNEL = "shoal_changed"
LOCK_TIMEOUT_S = 20
"""Longest wait for the writer's lock; then the request is refused and may be repeated."""
HANGING_AFTER_S = 10
"""The server ends a transaction that is idle for this long, so that one stuck process does not stop the others."""
CONNECT_TIMEOUT_S = 5
CHECKPOINT_PAGES = 8000
"""A page that changes often is copied back once per this many written ones; 32 MB of log are read at the next start."""


class Row(Protocol):
    """Values by column name; `rows` turns them into typed records."""

    def __getitem__(self, name: str, /) -> object: ...

    def keys(self) -> Iterable[str]: ...


def in_order(row: Row) -> list[Any]:
    """The values of a row as they were selected."""
    return list(row if isinstance(row, sqlite3.Row) else row.values())  # type: ignore[attr-defined]  # psycopg makes a dict


class Cursor(Protocol):
    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Row | None: ...

    def fetchall(self) -> list[Row]: ...

    def __iter__(self) -> Iterator[Row]: ...


class Connection(Protocol):
    def execute(self, sql: str, values: Sequence[object] = ..., /) -> Cursor: ...

    def executemany(self, sql: str, values: Iterable[Sequence[object]], /) -> object: ...

    def close(self) -> None: ...


class Transaction(Connection, Protocol):
    """A connection inside the writer's transaction."""

    def on_commit(self, effect: Callable[[], object], /) -> None:
        """Runs once the transaction is committed, never if it is rolled back: the only place to change memory."""


class Database(Protocol):
    name: str
    is_shared: bool
    """Whether other processes may write to it."""
    broken: type[Exception]
    """What is raised when the database itself fails: disk, network, server."""

    def connect(self) -> Connection: ...

    def begin_read(self, connection: Connection) -> None: ...

    def begin_write(self, connection: Connection) -> None: ...

    def announce(self, connection: Connection) -> None:
        """Notifies every listener once this transaction is committed."""

    def listen(self, heard: Callable[[], None], stopping: threading.Event) -> None:
        """Calls back after each announcement of any process, until `stopping` is set."""

    def schema_version(self, connection: Connection) -> int: ...

    def set_schema_version(self, connection: Connection, version: int) -> None: ...


class SQLite:
    is_shared = False
    broken: type[Exception] = sqlite3.OperationalError

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        path.parent.mkdir(parents=True, exist_ok=True)

    def connect(self) -> Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=30)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
        return connection

    def begin_read(self, connection: Connection) -> None:
        connection.execute("BEGIN")

    def begin_write(self, connection: Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")

    def announce(self, connection: Connection) -> None:
        """Only this process listens, and the store notifies it."""

    def listen(self, heard: Callable[[], None], stopping: threading.Event) -> None:
        """As above."""

    def schema_version(self, connection: Connection) -> int:
        return _number(connection, "PRAGMA user_version", "user_version")

    def set_schema_version(self, connection: Connection, version: int) -> None:
        connection.execute(f"PRAGMA user_version={version}")


class PostgreSQL:
    is_shared = True

    def __init__(self, url: str) -> None:
        self._url = url
        self._psycopg = _driver()
        self.broken: type[Exception] = self._psycopg.OperationalError
        self.name = _without_password(self._psycopg, url)

    def connect(self) -> Connection:
        connection = self._psycopg.connect(
            self._url,
            autocommit=True,
            row_factory=self._psycopg.rows.dict_row,
            connect_timeout=CONNECT_TIMEOUT_S,
            application_name="shoal coordinator",
        )
        connection.execute(
            f"SET lock_timeout='{LOCK_TIMEOUT_S}s'; SET idle_in_transaction_session_timeout='{HANGING_AFTER_S}s';"
            " SET default_transaction_isolation='read committed'"
        )
        return _Postgres(connection)

    def begin_read(self, connection: Connection) -> None:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def begin_write(self, connection: Connection) -> None:
        connection.execute(f"BEGIN; SELECT pg_advisory_xact_lock({WRITER_LOCK})")

    def announce(self, connection: Connection) -> None:
        connection.execute(f"NOTIFY {CHANNEL}")

    def listen(self, heard: Callable[[], None], stopping: threading.Event) -> None:
        while not stopping.is_set():
            try:
                self._listen_once(heard, stopping)
            except self.broken:
                stopping.wait(1.0)

    def _listen_once(self, heard: Callable[[], None], stopping: threading.Event) -> None:
        with self._psycopg.connect(self._url, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S) as connection:
            connection.execute(f"LISTEN {CHANNEL}")
            heard()  # whatever was announced while nobody listened
            while not stopping.is_set():
                for _ in connection.notifies(timeout=0.5, stop_after=1):
                    heard()

    def schema_version(self, connection: Connection) -> int:
        found = connection.execute("SELECT to_regclass('schema_version') AS name").fetchone()
        if found is None or found["name"] is None:
            return 0
        return _number(connection, "SELECT MAX(version) AS version FROM schema_version", "version")

    def set_schema_version(self, connection: Connection, version: int) -> None:
        connection.execute("CREATE TABLE IF NOT EXISTS schema_version (version BIGINT PRIMARY KEY)")
        connection.execute("INSERT INTO schema_version (version) VALUES (?)", (version,))


class _Postgres:
    """A psycopg connection that speaks the store's dialect."""

    def __init__(self, connection: "psycopg.Connection[Any]") -> None:
        self._connection = connection

    def execute(self, sql: str, values: Sequence[object] = (), /) -> Cursor:
        return self._connection.execute(_translated(sql), _plain(values) or None)

    def executemany(self, sql: str, values: Iterable[Sequence[object]], /) -> object:
        with self._connection.cursor() as cursor:
            cursor.executemany(_translated(sql), [_plain(row) for row in values])
        return None

    def close(self) -> None:
        self._connection.close()


def _number(connection: Connection, sql: str, column: str) -> int:
    row = connection.execute(sql).fetchone()
    value = None if row is None else row[column]
    return value if isinstance(value, int) else 0


@functools.lru_cache(maxsize=512)
def _translated(sql: str) -> Any:
    """Every `?` becomes a placeholder, also inside a literal: the coordinator's SQL has none there."""
    return sql.replace("?", "%s").replace(" WITHOUT ROWID", "")


def _plain(values: Sequence[object]) -> list[object]:
    """Flags are kept as numbers, as in SQLite, and states as their text."""
    return [
        int(value) if isinstance(value, bool) else str(value) if isinstance(value, StrEnum) else value
        for value in values
    ]


def _driver() -> Any:
    try:
        import psycopg
        import psycopg.rows
    except ImportError:
        raise ConfigError(
            "coordinator.store names a PostgreSQL database, but its driver is not installed.",
            hint="pip install 'shoal[postgres]'",
        ) from None
    return psycopg


def _without_password(driver: Any, url: str) -> str:
    try:
        fields = driver.conninfo.conninfo_to_dict(url)
    except driver.ProgrammingError as error:
        raise ConfigError(f"coordinator.store is not a PostgreSQL URL: {str(error).strip()}.") from None
    return f"postgresql://{fields.get('host', '')}/{fields.get('dbname', '')}"


def is_shared(store: str) -> bool:
    """Whether several coordinator processes may serve a run with this `coordinator.store`."""
    return store != "sqlite"


def open_database(store: str, path: Path) -> Database:
    """The database that `coordinator.store` names; `sqlite` is the file of the run directory."""
    return PostgreSQL(store) if is_shared(store) else SQLite(path)
