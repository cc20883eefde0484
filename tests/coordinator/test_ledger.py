import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator import ledger
from shoal.coordinator.ledger import GENESIS, Entry, LedgerError, balances, verify_export
from shoal.coordinator.store.database import Connection, SQLite
from shoal.coordinator.store.schema import migrate
from shoal.identity import Keypair
from support.samples import keypair

COORDINATOR = keypair("coordinator")
MALLORY = keypair("mallory")


def fresh() -> Connection:
    database = SQLite(Path(":memory:"))
    connection = database.connect()
    migrate(connection, database)
    return connection


def filled(key: Keypair = COORDINATOR) -> Connection:
    connection = fresh()
    ledger.append(connection, key, 1000.5, "run", run_id="run-1")
    ledger.append(connection, key, 1001.0, "credit", worker="w1", held=10, released=0)
    ledger.append(connection, key, 1002.25, "credit", worker="w2", held=7, released=3)
    ledger.append(connection, key, 1003.125, "slash", worker="w1", held=-10, slashed=10)
    ledger.append(connection, key, 1004.0, "verdict", worker="w1", accepted=False, text='"quotes" and ünicode')
    return connection


def export(connection: Connection, key: Keypair = COORDINATOR) -> list[bytes]:
    extent = ledger.whole(connection)
    return [*ledger.page(connection, 0, extent.entries), ledger.seal(key, "run-1", extent, 1005.0)]


LINES = export(filled())


def verify(lines: list[bytes]) -> list[Entry]:
    return verify_export(lines, COORDINATOR.public)[0]


def test_an_export_verifies_and_names_its_run() -> None:
    entries, run_id = verify_export(LINES, COORDINATOR.public)
    assert run_id == "run-1"
    assert [entry.kind for entry in entries] == ["run", "credit", "credit", "slash", "verdict"]
    assert entries[0].previous == GENESIS
    assert all(entry.previous == before.hash for before, entry in pairwise(entries))


def test_lines_may_come_with_or_without_their_ends() -> None:
    data = b"".join(LINES)
    assert verify(data.splitlines()) == verify(data.splitlines(keepends=True)) == verify(data.split(b"\n"))


def test_an_empty_ledger_is_sealed_too() -> None:
    assert verify(export(fresh())) == []


def test_pages_make_up_the_whole() -> None:
    connection = filled()
    assert ledger.page(connection, 0, 2) + ledger.page(connection, 2, 5) == LINES[:-1]


def test_the_head_counts_and_names_the_last_entry() -> None:
    assert ledger.head(fresh()) == (0, GENESIS)
    count, head = ledger.head(filled())
    assert (count, head) == (5, verify(LINES)[-1].hash)


def test_times_without_a_fraction_verify() -> None:
    connection = fresh()
    ledger.append(connection, COORDINATOR, 1000, "run")
    assert verify(export(connection))[0].at == 1000.0


@given(position=st.integers(0, len(b"".join(LINES)) - 1), flip=st.integers(1, 255))
def test_no_byte_of_an_export_can_change_unseen(position: int, flip: int) -> None:
    data = bytearray(b"".join(LINES))
    data[position] ^= flip
    line = b"".join(LINES)[:position].count(b"\n") + 1
    with pytest.raises(LedgerError) as caught:
        verify(bytes(data).split(b"\n"))
    if line < len(LINES):
        assert f"Entry {line - 1}" in caught.value.message


@pytest.mark.parametrize("missing", range(len(LINES) - 1))
def test_an_entry_that_was_taken_out_is_located(missing: int) -> None:
    where = f"Entry {missing}" if missing < len(LINES) - 2 else "5 entries, the export has 4"
    with pytest.raises(LedgerError, match=where):
        verify(LINES[:missing] + LINES[missing + 1 :])


@pytest.mark.parametrize("count", range(len(LINES)))
def test_truncation_shows(count: int) -> None:
    with pytest.raises(LedgerError, match="empty" if count == 0 else "truncated or forged"):
        verify(LINES[:count])


def test_entries_in_another_order_are_located() -> None:
    with pytest.raises(LedgerError, match="Entry 1"):
        verify([LINES[0], LINES[2], LINES[1], *LINES[3:]])


def test_a_chain_rewritten_without_the_key_is_located() -> None:
    with pytest.raises(LedgerError, match="Entry 0: The entry is not signed"):
        verify(export(filled(MALLORY), MALLORY))
    with pytest.raises(LedgerError, match="Entry 0: The entry is not signed"):
        verify([*export(filled(MALLORY))[:-1], LINES[-1]])


def test_a_seal_of_somebody_else_is_no_seal() -> None:
    with pytest.raises(LedgerError, match="truncated or forged"):
        verify([*LINES[:-1], export(filled(), MALLORY)[-1]])


def test_an_older_seal_on_a_shorter_chain_is_what_the_signed_head_is_for() -> None:
    shorter = filled()
    shorter.execute("DELETE FROM ledger WHERE seq=4")
    old = verify(export(shorter))
    assert old[-1].hash != verify(LINES)[-1].hash


def rewritten(change: Callable[[dict[str, object]], None]) -> list[bytes]:
    fields = json.loads(LINES[1])
    change(fields)
    return [LINES[0], json.dumps(fields).encode() + b"\n", *LINES[2:]]


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.update(seq="1"),
        lambda fields: fields.update(seq=True),
        lambda fields: fields.update(at="1001.0"),
        lambda fields: fields.update(at=1001),
        lambda fields: fields.update(kind=5),
        lambda fields: fields.update(body=None),
        lambda fields: fields.update(body={"worker": "w1"}),
        lambda fields: fields.update(signature=["x"]),
        lambda fields: fields.update(hash=7),
        lambda fields: fields.update(extra=1),
        lambda fields: fields.pop("kind"),
    ],
)
def test_entries_of_wrong_types_are_located_not_crashed_on(change: Callable[[dict[str, object]], None]) -> None:
    with pytest.raises(LedgerError, match="Entry 1: This line is not a ledger entry"):
        verify(rewritten(change))


@pytest.mark.parametrize("line", [b"[]", b"7", b"null", b'"text"', b"{" * 100_000, b"\xff", b" "])
def test_lines_that_are_no_entries_are_located(line: bytes) -> None:
    with pytest.raises(LedgerError, match="Entry 1: This line is not"):
        verify([LINES[0], line, *LINES[2:]])


def test_balances_follow_from_the_entries_alone() -> None:
    assert balances(verify(LINES)) == {
        "w1": {"held": 0, "released": 0, "slashed": 10},
        "w2": {"held": 7, "released": 3, "slashed": 0},
    }
