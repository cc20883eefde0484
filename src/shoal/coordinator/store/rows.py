"""Rows as frozen dataclasses: a field is a column, read and written by its name.

`query` reads any selection into any dataclass, `select` and `find` whole rows of a table. `insert` and `update` are the only
writers of rows; both hold every state to its machine, and `update` refuses a row that changed since it was read.
"""

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from shoal.coordinator.states import Machine, TransitionError
from shoal.coordinator.store.database import Connection, Row, in_order

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True)
class Record:
    """A row of one table."""

    table: ClassVar[str]
    key_columns: ClassVar[tuple[str, ...]]
    machine: ClassVar[Machine[Any] | None] = None
    is_remembered: ClassVar[bool] = False
    """Whether readers keep rows in memory: then nothing but `insert`, `update` and `update_all` changes the table."""


Kind = TypeVar("Kind", bound="DataclassInstance")
Table = TypeVar("Table", bound=Record)
Values = Sequence[object]
Function = TypeVar("Function", bound=Callable[..., object])


def _cached(function: Function) -> Function:
    """functools.cache keeps the signature here; its own type takes no classes as arguments."""
    return functools.cache(function)  # type: ignore[return-value]


def query(connection: Connection, kind: type[Kind], sql: str, values: Values = ()) -> list[Kind]:
    """What the statement selects; its columns are the fields of `kind`."""
    build = _builder(kind)
    return [build(row) for row in connection.execute(sql, values)]


def select(connection: Connection, kind: type[Table], rest: str = "", values: Values = ()) -> list[Table]:
    """Rows of the table; `rest` follows `FROM table` and may join."""
    build = _ordered_builder(kind)
    return [build(in_order(row)) for row in connection.execute(f"{_selection(kind)} {rest}", values)]


def find(connection: Connection, kind: type[Table], rest: str, values: Values = ()) -> Table | None:
    """The first such row."""
    row = connection.execute(f"{_selection(kind)} {rest}", values).fetchone()
    return None if row is None else _ordered_builder(kind)(in_order(row))


def number(connection: Connection, sql: str, values: Values = ()) -> int:
    """The one number that the statement selects as `n`; nothing counts as zero."""
    row = connection.execute(sql, values).fetchone()
    found = None if row is None else row["n"]
    return int(found) if isinstance(found, (int, float)) else 0


def insert(connection: Connection, *rows: Record, unless_known: bool = False) -> None:
    """Adds rows of one table."""
    for row in rows:
        if row.machine is not None:
            row.machine.require_initial(_state(row))
        note_change(connection, row)
    if rows:
        connection.executemany(
            _insertion(type(rows[0]), unless_known), [_values(row, _columns(type(row))) for row in rows]
        )


def update(connection: Connection, row: Table, **changes: object) -> Table:
    """Writes the changed columns; returns the row as it is now."""
    after = _changed(row, changes)
    sql, values = _change(row, after, tuple(changes))
    if connection.execute(sql, values).rowcount != 1:
        raise TransitionError(f"A row of {row.table} changed while it was being changed.")
    note_change(connection, after)
    return after


def update_all(connection: Connection, rows: Sequence[Table], **changes: object) -> None:
    """The same change of many rows."""
    if rows:
        made = [_change(row, _changed(row, changes), tuple(changes)) for row in rows]
        connection.executemany(made[0][0], [values for _, values in made])
        for row in rows:
            note_change(connection, row)


def note_change(connection: Connection, row: Record) -> None:
    """Readers forget the row when the transaction is committed. A connection outside a store has no readers."""
    if row.is_remembered and isinstance(changed := getattr(connection, "changed", None), list):
        changed.append(row)


def _changed(row: Table, changes: dict[str, object]) -> Table:
    after = replace(row, **changes)
    if row.machine is not None and "state" in changes:
        row.machine.require(_state(row), _state(after))
    return after


def _change(row: Table, after: Table, changed: tuple[str, ...]) -> tuple[str, list[object]]:
    known = (*row.key_columns, *(("state",) if row.machine is not None else ()))
    return _updating(type(row), changed), [*_values(after, changed), *_values(row, known)]


def _state(row: Record) -> StrEnum:
    state: StrEnum = getattr(row, "state")  # noqa: B009  # a record with a machine has it
    return state


def _values(row: Record, names: Iterable[str]) -> list[object]:
    return [getattr(row, name) for name in names]


@_cached
def _columns(kind: type[Record]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@_cached
def _selection(kind: type[Record]) -> str:
    return f"SELECT {', '.join(f'{kind.table}.{name} AS {name}' for name in _columns(kind))} FROM {kind.table}"


@_cached
def _insertion(kind: type[Record], unless_known: bool) -> str:
    names = _columns(kind)
    sql = f"INSERT INTO {kind.table} ({', '.join(names)}) VALUES ({','.join('?' * len(names))})"
    return f"{sql} ON CONFLICT DO NOTHING" if unless_known else sql


@_cached
def _updating(kind: type[Record], changed: tuple[str, ...]) -> str:
    known = (*kind.key_columns, *(("state",) if kind.machine is not None else ()))
    sets, conditions = (", ".join(f"{name}=?" for name in changed), " AND ".join(f"{name}=?" for name in known))
    return f"UPDATE {kind.table} SET {sets} WHERE {conditions}"


@_cached
def _builder(kind: type[Kind]) -> Callable[[Row], Kind]:
    """From a row that has the columns in any order."""
    names, build = [field.name for field in fields(kind)], _ordered_builder(kind)
    return lambda row: build([row[name] for name in names])


@_cached
def _ordered_builder(kind: type[Kind]) -> Callable[[list[Any]], Kind]:
    """From values in the order of the fields. A column by its name takes as long as there are columns."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    readers = [(place, read) for place, name in enumerate(names) if (read := _reader(hints[name])) is not None]

    def build(values: list[Any]) -> Kind:
        for place, read in readers:
            values[place] = read(values[place])
        return kind(*values)

    return build


def _reader(hint: Any) -> Callable[[Any], object] | None:
    """How a stored value becomes a field: flags are stored as numbers, states as text."""
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = [one for one in get_args(hint) if one is not types.NoneType]
        read = _reader(inner)
        return None if read is None else lambda value: None if value is None else read(value)
    return hint if isinstance(hint, type) and issubclass(hint, (bool, StrEnum)) else None
