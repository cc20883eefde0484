"""`shoal view`: the page on the files of a run that nobody serves, as it was at its last sign of life.

The store is copied before it is opened, so that a crashed run keeps every byte; nothing in the run directory changes. The page is
served on loopback, and its owner's screens need the secret of the printed link, as on a coordinator.
"""

import contextlib
import secrets
import shutil
import tempfile
import webbrowser
from collections.abc import Iterator
from pathlib import Path

from shoal.coordinator.http.acceptor import BoundedServer
from shoal.coordinator.http.app import ViewApp
from shoal.coordinator.http.listener import server_config
from shoal.coordinator.http.service import Service
from shoal.coordinator.page.session import link_secret, rotation_of
from shoal.coordinator.presence import Presence
from shoal.coordinator.relays import KnownRelay
from shoal.coordinator.rules.relays import Success
from shoal.coordinator.run import Run
from shoal.coordinator.server import bind
from shoal.coordinator.store import meta, records
from shoal.coordinator.store.database import is_shared, open_database
from shoal.coordinator.store.rows import query
from shoal.coordinator.store.writer import Store
from shoal.errors import ConfigError, ShoalError
from shoal.identity import Keypair
from shoal.inspection.groups import GroupReader
from shoal.metrics import EventLog, Record, Report, read_events
from shoal.net import http_url
from shoal.owner.control import owner_link
from shoal.owner.restore import restore_backup
from shoal.protocol import api
from shoal.rundir import RunDirectory

COPIES = 5
"""Tries to copy a store that changes meanwhile; then its coordinator runs, and SQLite copies it."""


def view_run(where: Path, report: Report, *, host: str, port: int, opens_browser: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="shoal-view-") as scratch:
        directory = _directory_of(where, Path(scratch), report)
        with opened(directory, Path(scratch)) as (app, secret):
            listener = bind(host, port, "port")
            link = owner_link(http_url(host, listener.getsockname()[1]), secret)
            report(f"{app.service.run.descriptor.run_id} as it was at its last sign of life; Ctrl-C ends")
            report(f"open {link}")
            if opens_browser:
                with contextlib.suppress(webbrowser.Error):
                    webbrowser.open(link)
            server = BoundedServer(server_config(app))
            server.run(sockets=[listener])


@contextlib.contextmanager
def opened(directory: RunDirectory, scratch: Path) -> Iterator[tuple[ViewApp, str]]:
    """The application of the page on a copy of the store, and the secret of its owner's link."""
    store = _open_copy(directory, scratch)
    try:
        run = _run_at_rest(directory, store)
        app = ViewApp(Service(store, run, directory.descriptor_file.read_bytes(), rollouts=GroupReader(directory)))
        yield app, link_secret(run.secret, run.descriptor.run_id, store.read(rotation_of))
    finally:
        store.close()


def _directory_of(where: Path, scratch: Path, report: Report) -> RunDirectory:
    if where.is_file() and where.suffix != ".toml":
        return restore_backup(where, report, target=scratch / "restored")
    directory = RunDirectory(where.parent if where.is_file() else where)
    directory.descriptor()  # refuses a directory that holds no run
    return directory


def _open_copy(directory: RunDirectory, scratch: Path) -> Store:
    setting = directory.config().coordinator.store
    if is_shared(setting):
        return Store(open_database(setting, directory.store))
    if not directory.store.exists():
        raise ConfigError(f"{directory.root} has no coordinator's store.", hint="The run was never started here.")
    target = scratch / "store.db"
    copy_at_rest(directory.store, target)
    return Store(open_database(setting, target))


def copy_at_rest(source: Path, target: Path) -> None:
    """Database and log as they lie there, without opening them: opening would write what a crash left unwritten."""
    parts = [(source, target), (_log_of(source), _log_of(target))]
    for _ in range(COPIES):
        before = [_signature(path) for path, _ in parts]
        for path, copy in parts:
            copy.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(path, copy)
        if before == [_signature(path) for path, _ in parts]:
            return
    _log_of(target).unlink(missing_ok=True)
    records.copy_store(source, target)


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _signature(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns


def _run_at_rest(directory: RunDirectory, store: Store) -> Run:
    """Its clock stands still at the last sign of life, so that a dead run is not called late."""
    config = directory.config()
    last = store.read(lambda connection: query(connection, meta.Moment, meta.LAST_SIGN)[0].at) or 0.0
    events = directory.events / "coordinator.jsonl"
    presence = Presence(lambda: last, config.coordinator.gone_after_s)
    for record in read_events(events, names=("relay",)):
        _recall_relay(presence, record)
    return Run(
        config=config,
        descriptor=directory.descriptor(),
        keypair=_key_of(directory),
        secret=_secret_of(directory),
        role_keys={},
        submissions=directory.submissions,
        presence=presence,
        clock=lambda: last,
        free_bytes=_unknown_space,
        metrics=EventLog(events),
        is_live=False,
    )


def _unknown_space(path: Path) -> int:
    """The disk of today is not the disk of the run."""
    raise OSError("not measured")


def _recall_relay(presence: Presence, record: Record) -> None:
    fields = {name: record.get(name) for name in api.RelayBody.model_fields if name in record}
    with contextlib.suppress(ValueError, TypeError):  # a broken line of the events file
        key, at = str(record.get("key")), float(record["at"])
        known = KnownRelay(at, api.RelayBody.model_validate(fields), address=key)
        if "success" in record:
            known.past_success = Success(float(record["success"]), int(record.get("reporters", 0)))
        presence.relays.known[key] = known


def _secret_of(directory: RunDirectory) -> bytes:
    try:
        return directory.secret()
    except ShoalError:
        return secrets.token_bytes(32)  # a copy without keys: a link of its own


def _key_of(directory: RunDirectory) -> Keypair:
    try:
        return directory.existing_key("coordinator")
    except (ShoalError, OSError):
        return Keypair.generate()
