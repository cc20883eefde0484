"""The page on the files of a run that nobody serves."""

import sqlite3
from pathlib import Path

from shoal.coordinator.presence import Presence
from shoal.owner.viewing import _recall_relay, copy_at_rest


def crashed_store(path: Path) -> None:
    """A database whose last commit is only in its log, as a kill leaves it."""
    writer = sqlite3.connect(path)
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute("CREATE TABLE facts (name TEXT)")
    writer.execute("INSERT INTO facts VALUES ('last')")
    writer.commit()
    log = path.with_name(f"{path.name}-wal")
    kept = {file: file.read_bytes() for file in (path, log)}
    writer.close()  # copies the log back and removes it: undone here
    for file, data in kept.items():
        file.write_bytes(data)


def test_a_crashed_store_is_read_whole_and_keeps_every_byte(tmp_path: Path) -> None:
    source, target = tmp_path / "run" / "store.db", tmp_path / "copy.db"
    source.parent.mkdir()
    crashed_store(source)
    before = {path.name: path.read_bytes() for path in source.parent.iterdir()}
    copy_at_rest(source, target)
    copied = sqlite3.connect(target)
    assert copied.execute("SELECT name FROM facts").fetchall() == [("last",)]
    copied.close()
    assert {path.name: path.read_bytes() for path in source.parent.iterdir()} == before


def test_relays_are_recalled_from_events_and_broken_ones_left_out() -> None:
    presence = Presence(lambda: 10.0, 30.0)
    _recall_relay(presence, {"at": 5.0, "event": "relay", "key": "a", "url": "http://relay", "newest_version": 3})
    _recall_relay(presence, {"at": 5.0, "event": "relay", "key": "b", "url": "no address", "newest_version": "x"})
    assert list(presence.relays.known) == ["a"]
    assert presence.relays.known["a"].body.newest_version == 3
