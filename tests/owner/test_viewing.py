"""The page on the files of a run that nobody serves."""

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from shoal.config import build_config
from shoal.coordinator import Store
from shoal.coordinator.presence import Presence
from shoal.coordinator.rules.relays import Success
from shoal.coordinator.server import begin, build_run
from shoal.errors import ConfigError, ShoalError
from shoal.owner.backup import write_backup
from shoal.owner.create import initialise
from shoal.owner.viewing import _directory_of, _recall_relay, copy_at_rest, opened
from shoal.rundir import RunDirectory


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


def test_a_relays_success_is_recalled_with_it() -> None:
    presence = Presence(lambda: 10.0, 30.0)
    record = {"at": 5.0, "event": "relay", "key": "a", "url": "http://relay", "newest_version": 3}
    _recall_relay(presence, record | {"success": 0.75, "reporters": 2})
    _recall_relay(presence, record | {"key": "b", "url": "http://other", "success": "often", "reporters": None})
    assert list(presence.relays.known) == ["a"]
    assert presence.relays.success(presence.relays.known["a"]) == Success(0.75, 2)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run whose coordinator was started once."""
    root = tmp_path_factory.mktemp("viewed")
    directory = initialise(build_config({"run": {"dir": root / "run"}, "tasks": {"count": 10, "heldout": 2}}))
    run, store = build_run(directory), Store(directory.store)
    store.write(lambda connection: begin(connection, run))
    store.close()
    return directory


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def visit(directory: RunDirectory, scratch: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The session as a visitor sees it, and how the routes answer the owner."""
    with opened(directory, scratch) as (app, secret), TestClient(app) as http:
        session = http.get("/v1/session").json()
        private = http.get("/v1/owner/timeline").status_code
        assert http.post("/v1/owner/session", json={"secret": secret}).status_code == 200
        paths = ("/", "/v1/status", "/v1/curves", "/v1/workers", "/v1/ledger", "/v1/owner/timeline", "/metrics")
        found = {path: http.get(path).status_code for path in paths}
        changing = http.post("/v1/run/state", json={"state": "paused"}).status_code
        return session, found | {"without cookie": private, "changing": changing}


def test_a_stopped_run_opens_and_nothing_in_its_directory_changes(stopped: RunDirectory, tmp_path: Path) -> None:
    before = contents(stopped.root)
    session, answers = visit(stopped, tmp_path)
    assert (session["is_live"], session["is_owner"]) == (False, False)
    assert (answers.pop("without cookie"), answers.pop("changing")) == (403, 404)
    assert set(answers.values()) == {200}
    assert contents(stopped.root) == before


@pytest.mark.parametrize("with_keys", [True, False])
def test_a_backup_archive_opens_without_being_restored_by_hand(
    stopped: RunDirectory, tmp_path: Path, with_keys: bool
) -> None:
    archive = tmp_path / "run.backup"
    write_backup(stopped, archive, lambda text: None, sleep=lambda seconds: None)
    before = archive.read_bytes()
    directory = _directory_of(archive, tmp_path / "scratch", lambda text: None)
    if not with_keys:
        shutil.rmtree(directory.root / "keys")
    (tmp_path / "store").mkdir()
    _, answers = visit(directory, tmp_path / "store")
    assert answers["/v1/status"] == answers["/v1/owner/timeline"] == 200
    assert archive.read_bytes() == before


def test_a_directory_without_a_run_and_one_that_never_started_are_refused_in_words(
    stopped: RunDirectory, tmp_path: Path
) -> None:
    with pytest.raises(ShoalError):
        _directory_of(tmp_path, tmp_path / "scratch", lambda text: None)
    shutil.copytree(stopped.root, tmp_path / "fresh")
    fresh = RunDirectory(tmp_path / "fresh")
    fresh.store.unlink()
    with pytest.raises(ConfigError, match="no coordinator's store"), opened(fresh, tmp_path):
        raise AssertionError("it was opened")
