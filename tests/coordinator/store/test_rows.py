"""Rows as records: every column of every table, by name, and states that only their machine changes."""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

from shoal.coordinator.ledger import Entry
from shoal.coordinator.states import LeaseState, SlotState, SubmissionState, TransitionError
from shoal.coordinator.store import tables
from shoal.coordinator.store.database import Connection, SQLite
from shoal.coordinator.store.rows import Record, find, insert, number, query, select, update, update_all
from shoal.coordinator.store.schema import migrate
from shoal.coordinator.store.tables import LeaseRow, SlotRow, SubmissionRow, WorkerRow

RECORDS = [kind for kind in vars(tables).values() if isinstance(kind, type) and issubclass(kind, Record)]
WORKER = WorkerRow("key", "ann", "torch/float32/cpu", 2.5, 7, 1.5, 10.0)
SLOT = SlotRow(3, 4, SlotState.LEASED, "lease", 1, 2, "torch/float32/cpu", deferred=False, due_at=9.0)
LEASE = LeaseRow("lease", "request", "key", 3, 4, 2, "digest", 1.0, 2.0, LeaseState.LEASED, by_active_key=True)
SUBMISSION = SubmissionRow("one", "lease", "key", "digest", 9, "signed", 1.0, "[0]", 3, 0.5, "torch/float32/cpu")


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[Connection]:
    database = SQLite(tmp_path / "store.db")
    connection = database.connect()
    migrate(connection, database)
    yield connection
    connection.close()


@pytest.mark.parametrize(
    "kind", [kind for kind in [*RECORDS, Entry] if kind is not Record], ids=lambda kind: kind.table
)
def test_a_record_has_the_columns_of_its_table(connection: Connection, kind: type[Record]) -> None:
    info = connection.execute(f"PRAGMA table_info({kind.table})").fetchall()
    columns = {str(row["name"]): bool(row["notnull"]) or bool(row["pk"]) for row in info}
    assert set(columns) == {field.name for field in fields(kind)}
    optional = {field.name for field in fields(kind) if "None" in str(field.type)}
    assert optional == {name for name, required in columns.items() if not required}
    assert set(kind.key_columns) == {str(row["name"]) for row in info if row["pk"]}


@pytest.mark.parametrize("row", [WORKER, SLOT, LEASE, SUBMISSION], ids=lambda row: row.table)
def test_what_is_inserted_is_read_back(connection: Connection, row: Record) -> None:
    insert(connection, row)
    (read,) = select(connection, type(row))
    assert read == row
    assert [type(getattr(read, field.name)) for field in fields(read)] == [
        type(getattr(row, field.name)) for field in fields(row)
    ]


def test_only_the_changed_columns_are_written(connection: Connection) -> None:
    insert(connection, WORKER)
    connection.execute("UPDATE workers SET accepted=5")
    after = update(connection, WORKER, name="bob", banned_at=3.0)
    assert (after.name, after.banned_at, after.accepted) == ("bob", 3.0, 0)
    assert find(connection, WorkerRow, "WHERE key=?", ("key",)) == replace(
        WORKER, name="bob", banned_at=3.0, accepted=5
    )


def test_a_column_that_does_not_exist_is_a_mistake_of_ours(connection: Connection) -> None:
    with pytest.raises(TypeError):
        update(connection, WORKER, nmae="bob")


def test_a_state_changes_along_its_machine_only(connection: Connection) -> None:
    insert(connection, SLOT)
    with pytest.raises(TransitionError, match="slot cannot go from leased to closed"):
        update(connection, SLOT, state=SlotState.CLOSED)
    assert select(connection, SlotRow) == [SLOT]
    submitted = update(connection, SLOT, state=SlotState.SUBMITTED)
    assert select(connection, SlotRow) == [submitted]


def test_many_rows_change_together_or_not_at_all(connection: Connection) -> None:
    rows = [replace(SLOT, slot=slot) for slot in range(3)]
    insert(connection, *rows)
    opened = [update(connection, row, state=SlotState.OPEN, lease_id=None) for row in rows[:2]]
    with pytest.raises(TransitionError):
        update_all(connection, [*opened, rows[2]], state=SlotState.CLOSED)
    assert number(connection, "SELECT COUNT(*) AS n FROM slots WHERE state='closed'") == 0
    update_all(connection, opened, state=SlotState.CLOSED)
    assert number(connection, "SELECT COUNT(*) AS n FROM slots WHERE state='closed'") == 2
    update_all(connection, list[SlotRow](), state=SlotState.CLOSED)


def test_a_row_that_changed_since_it_was_read_is_not_overwritten(connection: Connection) -> None:
    insert(connection, LEASE)
    update(connection, LEASE, state=LeaseState.EXPIRED)
    with pytest.raises(TransitionError, match="changed while"):
        update(connection, LEASE, state=LeaseState.SUBMITTED)
    with pytest.raises(TransitionError, match="changed while"):
        update(connection, replace(WORKER, key="nobody"), name="bob")


def test_a_row_begins_where_its_machine_begins(connection: Connection) -> None:
    with pytest.raises(TransitionError, match="submission cannot begin as decided"):
        insert(connection, replace(SUBMISSION, state=SubmissionState.DECIDED))
    assert select(connection, SubmissionRow) == []


def test_a_known_row_is_kept_if_asked_for_and_refused_otherwise(connection: Connection) -> None:
    insert(connection, WORKER)
    insert(connection, replace(WORKER, name="bob"), unless_known=True)
    assert select(connection, WorkerRow) == [WORKER]
    with pytest.raises(sqlite3.IntegrityError):
        insert(connection, WORKER)


def test_a_value_of_an_unknown_state_is_refused_when_it_is_read(connection: Connection) -> None:
    insert(connection, SLOT)
    connection.execute("UPDATE slots SET state='lost'")
    with pytest.raises(ValueError, match="lost"):
        select(connection, SlotRow)


@dataclass(frozen=True)
class Sum:
    n: int
    is_large: bool
    label: str | None


def test_any_selection_is_read_by_name_whatever_its_order(connection: Connection) -> None:
    sql = "SELECT NULL AS label, 1 AS is_large, 7 AS n"
    found: list[Any] = query(connection, Sum, sql)
    assert found == [Sum(7, True, None)]
    assert found[0].is_large is True


def test_nothing_counts_as_zero(connection: Connection) -> None:
    assert number(connection, "SELECT MAX(slot) + 1 AS n FROM slots") == 0
    assert number(connection, "SELECT 1 AS n WHERE 1=0") == 0
