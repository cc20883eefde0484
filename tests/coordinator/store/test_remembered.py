from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.coordinator.store import meta
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.remembered import Remembered
from shoal.coordinator.store.writer import Store
from shoal.errors import RefusedError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "store.db")
    yield store
    store.close()


class Epoch(Remembered[str]):
    """Counts how often the store is really read."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, self._count)
        self.store, self.reads = store, 0

    def _count(self, connection: Connection) -> str:
        self.reads += 1
        return meta.read(connection, "epoch") or "0"

    def look(self) -> str:
        return self.store.read_rows(self.value)


def test_a_value_is_read_again_after_a_commit_only(store: Store) -> None:
    epoch = Epoch(store)
    assert [epoch.look() for _ in range(3)] == ["0"] * 3
    assert epoch.reads == 1
    store.write(lambda connection: meta.write(connection, "epoch", "1"))
    assert [epoch.look() for _ in range(3)] == ["1"] * 3
    assert epoch.reads == 2


def test_a_commit_during_the_read_is_seen_by_the_next_one(store: Store) -> None:
    epoch = Epoch(store)

    def read_old(connection: Connection) -> str:
        before = meta.read(connection, "epoch") or "0"
        if before == "0":
            store.write(lambda writer: meta.write(writer, "epoch", "1"))
        return before

    epoch._read = read_old
    assert [epoch.look(), epoch.look()] == ["0", "1"]


def test_a_refused_change_shows_nothing(store: Store) -> None:
    epoch = Epoch(store)
    epoch.look()

    def refuse(connection: Connection) -> None:
        meta.write(connection, "epoch", "1")
        raise RefusedError("no", "Not like this.")

    with pytest.raises(RefusedError):
        store.write(refuse)
    assert epoch.look() == "0"


def test_nothing_is_remembered_where_other_processes_write(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = Epoch(store)
    monkeypatch.setattr(store.database, "is_shared", True)
    assert [epoch.look(), epoch.look()] == ["0", "0"]
    assert epoch.reads == 2
