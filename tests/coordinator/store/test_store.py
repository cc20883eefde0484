import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from shoal.coordinator.store.database import Connection, Transaction
from shoal.coordinator.store.schema import MIGRATIONS, SchemaError, schema_version
from shoal.coordinator.store.writer import LARGEST_GROUP, Look, Savepoint, Store, StoreError, Work
from shoal.errors import RefusedError
from support.swarm import page_count

PATIENCE_S = 30


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "store.db")
    yield store
    store.close()


def put(name: str, value: str = "") -> Work[int]:
    return lambda connection: connection.execute("INSERT INTO meta VALUES (?,?)", (name, value)).rowcount


def names(connection: Connection) -> list[str]:
    return [str(row["name"]) for row in connection.execute("SELECT name FROM meta ORDER BY name")]


def refuse(connection: Transaction) -> None:
    put("half")(connection)
    raise RefusedError("no", "Not like this.")


def tracing(heard: Callable[[str], object] | None) -> Look[None]:
    def trace(connection: Connection) -> None:
        raw = connection.connection if isinstance(connection, Savepoint) else connection
        assert isinstance(raw, sqlite3.Connection)
        raw.set_trace_callback(heard)

    return trace


class Gate:
    """Holds the writer until several works wait behind it."""

    def __init__(self, store: Store) -> None:
        self._entered, self._open = threading.Event(), threading.Event()
        self._held: Future[None] = store.submit(self._hold)
        assert self._entered.wait(PATIENCE_S)

    def _hold(self, _: Connection) -> None:
        self._entered.set()
        assert self._open.wait(PATIENCE_S)

    def open(self) -> None:
        self._open.set()
        self._held.result(PATIENCE_S)


def test_what_was_written_is_read(store: Store) -> None:
    assert store.write(put("a")) == 1
    assert store.read(names) == ["a"]


@pytest.mark.parametrize("count", [50, LARGEST_GROUP + 10])
def test_waiting_writes_share_their_commits(store: Store, count: int) -> None:
    statements: list[str] = []
    store.write(tracing(statements.append))
    gate = Gate(store)
    statements.clear()
    futures = [store.submit(put(f"{number:03}")) for number in range(count)]
    gate.open()
    for future in futures:
        future.result(PATIENCE_S)
    assert len(store.read(names)) == count
    assert statements.count("COMMIT") == 1 + -(-count // LARGEST_GROUP)


def test_a_refused_write_leaves_no_trace_and_does_not_disturb_its_neighbours(store: Store) -> None:
    gate = Gate(store)
    before, refused, after = store.submit(put("before")), store.submit(refuse), store.submit(put("after"))
    gate.open()
    assert (before.result(PATIENCE_S), after.result(PATIENCE_S)) == (1, 1)
    with pytest.raises(RefusedError, match="Not like this"):
        refused.result(PATIENCE_S)
    assert store.read(names) == ["after", "before"]


def test_a_caller_that_went_away_does_not_stop_the_writer(store: Store) -> None:
    gate = Gate(store)
    abandoned, kept = store.submit(put("abandoned")), store.submit(put("kept"))
    assert abandoned.cancel()
    gate.open()
    kept.result(PATIENCE_S)
    assert store.read(names) == ["kept"]
    store.write(put("later"))


def test_a_full_disk_fails_the_whole_group_and_the_store_goes_on_when_there_is_room(store: Store) -> None:
    pages = store.write(page_count)
    store.write(lambda connection: connection.execute(f"PRAGMA max_page_count={pages + 1}").fetchone())
    gate = Gate(store)
    small, large = store.submit(put("small")), store.submit(put("large", "x" * 100_000))
    gate.open()
    for future in (small, large):
        with pytest.raises(StoreError, match="disk is full") as caught:
            future.result(PATIENCE_S)
    assert "nothing of this request was kept" in caught.value.hint
    assert store.read(names) == []
    store.write(lambda connection: connection.execute("PRAGMA max_page_count=1000000").fetchone())
    store.write(put("large", "x" * 100_000))
    assert store.read(names) == ["large"]


def test_readers_see_committed_state_only(store: Store) -> None:
    written, checked = threading.Event(), threading.Event()

    def slow(connection: Transaction) -> None:
        put("uncommitted")(connection)
        written.set()
        assert checked.wait(PATIENCE_S)

    future = store.submit(slow)
    assert written.wait(PATIENCE_S)
    assert store.read(names) == []
    checked.set()
    future.result(PATIENCE_S)
    assert store.read(names) == ["uncommitted"]


def test_one_read_sees_one_state_whatever_is_written_meanwhile(store: Store) -> None:
    def twice(connection: Connection) -> tuple[list[str], list[str]]:
        first = names(connection)
        store.write(put("meanwhile"))
        return first, names(connection)

    first, second = store.read(twice)
    assert first == second == []
    assert store.read(names) == ["meanwhile"]


def test_a_reader_that_fails_does_not_block_the_next(store: Store) -> None:
    with pytest.raises(ZeroDivisionError):
        store.read(lambda connection: 1 // 0)
    with pytest.raises(StoreError, match="cannot be read"):
        store.read(lambda connection: connection.execute("SELECT * FROM nowhere"))
    assert store.read(names) == []


def test_closing_finishes_what_was_accepted_and_refuses_what_comes_later(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.db")
    gate = Gate(store)
    futures = [store.submit(put(f"{number:03}")) for number in range(20)]
    closing = threading.Thread(target=store.close)
    closing.start()
    gate.open()
    closing.join(PATIENCE_S)
    assert all(future.result(PATIENCE_S) == 1 for future in futures)
    with pytest.raises(StoreError, match="closed"):
        store.submit(put("late"))


def test_a_store_is_opened_again_with_everything_in_it(tmp_path: Path) -> None:
    for name in ("first", "second"):
        store = Store(tmp_path / "deep" / "store.db")
        store.write(put(name))
        found = store.read(names)
        store.close()
    assert found == ["first", "second"]


def test_a_store_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(SchemaError, match=r"newer release \(schema 99") as caught:
        Store(path)
    assert "Upgrade" in caught.value.hint


NEXT = "CREATE TABLE later (n BIGINT);\n"


def older_store(path: Path) -> int:
    """A store as this release writes it, with something in it; returns its schema version."""
    store = Store(path)
    store.write(put("kept"))
    store.close()
    return schema_version()


def test_an_older_store_is_brought_up_to_date_and_keeps_what_it_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    version = older_store(path)
    monkeypatch.setitem(MIGRATIONS, version + 1, NEXT)
    for _ in range(2):
        store = Store(path)
        assert store.read(names) == ["kept"]
        assert store.read(store.database.schema_version) == version + 1
        assert store.read(lambda connection: connection.execute("SELECT n FROM later").fetchall()) == []
        store.close()


def test_a_store_that_no_migration_leads_from_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version={min(MIGRATIONS) - 1}")
    connection.close()
    with pytest.raises(SchemaError, match="too old"):
        Store(path)


def test_an_upgrade_that_fails_leaves_the_older_store_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    version = older_store(path)
    script = "CREATE TABLE half (n BIGINT);\nCREATE TABLE meta (n BIGINT);\n"
    monkeypatch.setitem(MIGRATIONS, version + 1, script)
    with pytest.raises(sqlite3.OperationalError, match="already exists"):
        Store(path)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (version,)
    assert connection.execute("SELECT 1 FROM sqlite_master WHERE name='half'").fetchone() is None
    connection.close()


def test_listeners_hear_of_changes_that_ask_for_it_and_of_no_refused_ones(store: Store) -> None:
    heard: list[bool] = []
    store.on_change(lambda: heard.append(True))
    store.write(put("quiet"))
    store.write(put("loud"), announces=lambda result: result == 1)
    store.write(put("other"), announces=lambda result: result == 2)
    with pytest.raises(RefusedError):
        store.write(refuse, announces=lambda _: True)
    assert len(heard) == 1


def test_memory_changes_after_the_commit_and_never_after_a_refusal(store: Store) -> None:
    seen: list[object] = []

    def kept(connection: Transaction) -> None:
        put("kept")(connection)
        connection.on_commit(lambda: seen.append(store.read(names)))
        assert seen == []

    def refused(connection: Transaction) -> None:
        connection.on_commit(lambda: seen.append("refused"))
        refuse(connection)

    with pytest.raises(RefusedError):
        store.write(refused)
    store.write(kept)
    assert seen == [["kept"]]


def test_an_effect_that_fails_does_not_stop_the_writer(store: Store) -> None:
    def work(connection: Transaction) -> None:
        connection.on_commit(lambda: 1 // 0)

    store.write(work)
    store.write(put("later"))
    assert store.read(names) == ["later"]


def test_memory_does_not_change_when_the_whole_group_fails(store: Store) -> None:
    pages = store.write(page_count)
    store.write(lambda connection: connection.execute(f"PRAGMA max_page_count={pages + 1}").fetchone())
    gate, seen = Gate(store), list[str]()

    def small(connection: Transaction) -> None:
        put("small")(connection)
        connection.on_commit(lambda: seen.append("small"))

    future, large = store.submit(small), store.submit(put("large", "x" * 100_000))
    gate.open()
    for refused in (future.result, large.result):
        with pytest.raises(StoreError, match="disk is full"):
            refused(PATIENCE_S)
    assert seen == []
