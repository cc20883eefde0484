"""Rows in memory are those of the store, whatever changed them and when."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from shoal.coordinator import workers
from shoal.coordinator.batching import rewinds
from shoal.coordinator.store.database import Connection, SQLite, Transaction
from shoal.coordinator.store.remembered import RememberedWorkers
from shoal.coordinator.store.rows import find, insert, select, update, update_all
from shoal.coordinator.store.tables import WorkerRow
from shoal.coordinator.store.writer import Store

KEY = "k"


class CountingSQLite(SQLite):
    """Counts the statements that read workers."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reads = 0

    def connect(self) -> Connection:
        connection = super().connect()
        connection.set_trace_callback(self._count)  # type: ignore[attr-defined]  # of sqlite3
        return connection

    def _count(self, sql: str) -> None:
        self.reads += "FROM workers" in sql


@pytest.fixture
def database(tmp_path: Path) -> CountingSQLite:
    return CountingSQLite(tmp_path / "store.db")


@pytest.fixture
def store(database: CountingSQLite) -> Iterator[Store]:
    store = Store(database)
    store.write(lambda connection: insert(connection, worker(KEY)))
    yield store
    store.close()


def worker(key: str, **facts: object) -> WorkerRow:
    named = {"name": "ann", "numerics_class": "c", "tokens_per_s": 1.0, "memory_bytes": 1, "link_bytes_per_s": 1.0}
    return WorkerRow(key=key, registered_at=0.0, **(named | facts))  # type: ignore[arg-type]  # names of columns


def known(connection: Connection) -> WorkerRow:
    row = find(connection, WorkerRow, "WHERE key=?", (KEY,))
    assert row is not None
    return row


def seen(store: Store, remembered: RememberedWorkers, key: str = KEY) -> WorkerRow | None:
    return store.read_rows(lambda connection: remembered.find(connection, key))


def test_a_row_is_read_once(store: Store, database: CountingSQLite) -> None:
    remembered = RememberedWorkers(store)
    first = seen(store, remembered)
    before = database.reads
    assert [seen(store, remembered) for _ in range(5)] == [first] * 5
    assert first is not None
    assert database.reads == before


def test_a_change_is_seen_as_soon_as_its_writer_has_an_answer(store: Store) -> None:
    remembered = RememberedWorkers(store)
    for accepted in range(1, 20):
        seen(store, remembered)
        store.write(lambda connection, n=accepted: update(connection, known(connection), accepted=n))  # type: ignore[misc]
        row = seen(store, remembered)
        assert row is not None
        assert row.accepted == accepted


def test_a_refused_change_leaves_the_row(store: Store) -> None:
    remembered = RememberedWorkers(store)
    before = seen(store, remembered)

    def refused(connection: Transaction) -> None:
        update(connection, known(connection), accepted=7)
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011  # ours, just above
        store.write(refused)
    assert seen(store, remembered) == before


def test_an_unknown_key_is_looked_for_again(store: Store) -> None:
    remembered = RememberedWorkers(store)
    assert seen(store, remembered, "new") is None
    store.write(lambda connection: insert(connection, worker("new")))
    assert seen(store, remembered, "new") is not None


def test_rows_changed_together_are_all_forgotten(store: Store) -> None:
    remembered = RememberedWorkers(store)
    seen(store, remembered)
    store.write(lambda connection: update_all(connection, select(connection, WorkerRow), newest_used=3))
    row = seen(store, remembered)
    assert row is not None
    assert row.newest_used == 3


def test_a_rewind_is_seen(store: Store) -> None:
    remembered = RememberedWorkers(store)
    store.write(lambda connection: update(connection, known(connection), newest_used=9))
    seen(store, remembered)
    store.write(lambda connection: rewinds._forget(connection, 4))
    row = seen(store, remembered)
    assert row is not None
    assert row.newest_used == 4


def test_a_row_read_while_a_commit_is_under_way_is_not_kept(store: Store) -> None:
    """The reader begins before the commit and ends after it: what it read is old, and nobody would forget it any more."""
    remembered = RememberedWorkers(store)
    has_read, has_committed = threading.Event(), threading.Event()

    class Slow:
        """A connection whose answer takes as long as a whole commit."""

        def __init__(self, connection: Connection) -> None:
            self._connection = connection

        def execute(self, sql: str, values: tuple[object, ...] = ()) -> object:
            rows = self._connection.execute(sql, values).fetchall()
            has_read.set()
            assert has_committed.wait(10)
            return _Rows(rows)

    def look() -> None:
        store.read_rows(lambda connection: remembered.find(Slow(connection), KEY))  # type: ignore[arg-type]  # enough of one

    reader = threading.Thread(target=look)
    reader.start()
    assert has_read.wait(10)
    store.write(lambda connection: update(connection, known(connection), accepted=5))
    has_committed.set()
    reader.join()
    row = seen(store, remembered)
    assert row is not None
    assert row.accepted == 5


class _Rows:
    def __init__(self, rows: Sequence[object]) -> None:
        self._rows = rows

    def fetchone(self) -> object:
        return self._rows[0] if self._rows else None


def test_memory_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.coordinator.store.remembered.MOST_ROWS", 4)
    remembered = RememberedWorkers(store)
    store.write(lambda connection: insert(connection, *(worker(f"k{number}") for number in range(20))))
    for number in range(20):
        assert seen(store, remembered, f"k{number}") is not None
    assert len(remembered._rows) <= 4


def test_nothing_but_records_writes_to_a_remembered_table() -> None:
    """Other statements would leave old rows in memory. Strangers that are gone are deleted: their state says enough."""
    root = Path(workers.__file__).parents[1]
    found = [
        (path.name, line.strip())
        for path in root.rglob("*.py")
        for line in path.read_text().splitlines()
        if any(text in line for text in ("UPDATE workers", "INTO workers", "DELETE FROM workers"))
    ]
    assert [name for name, _ in found] == ["workers.py"]
    assert "DELETE FROM workers WHERE state='gone'" in found[0][1]
