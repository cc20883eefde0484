"""Starts the coordinator of a run directory and serves it until it is stopped."""

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from shoal.coordinator import ledger
from shoal.coordinator.batching import steps
from shoal.coordinator.batching.timing import LeaseTiming
from shoal.coordinator.http.acceptor import BoundedServer
from shoal.coordinator.http.app import CoordinatorApp, create_app
from shoal.coordinator.http.listener import WAITING_CONNECTIONS, server_config
from shoal.coordinator.ledger import secrets
from shoal.coordinator.page.rollouts import RolloutReader
from shoal.coordinator.presence import Presence
from shoal.coordinator.rules import trust
from shoal.coordinator.run import Run
from shoal.coordinator.store import meta, records
from shoal.coordinator.store.bucket import open_bucket
from shoal.coordinator.store.database import Connection, Transaction, is_shared, open_database
from shoal.coordinator.store.rows import find, select
from shoal.coordinator.store.tables import SubmissionRow, WorkerRow
from shoal.coordinator.store.writer import Store
from shoal.coordinator.workers import proven_keys
from shoal.errors import ConfigError, ShoalError
from shoal.metrics import EventLog
from shoal.net import raise_file_limit
from shoal.rundir import RunDirectory


class PortTakenError(ShoalError):
    """Another process listens on the port."""

    code = "port_taken"
    permanent = True


def run_coordinator(
    directory: RunDirectory,
    *,
    on_ready: Callable[[str], None] | None = None,
    rollouts: RolloutReader | None = None,
) -> None:
    run = build_run(directory)
    listener = bind(run.config.coordinator.host, run.config.coordinator.port, "coordinator.port")
    store = Store(open_database(run.config.coordinator.store, directory.store))
    store.write(lambda connection: begin(connection, run))
    collect_leftovers(store, run)
    app = create_app(
        store, run, directory.descriptor_file.read_bytes(), open_files=raise_file_limit(), rollouts=rollouts
    )
    server = _Server(server_config(app))
    if on_ready is not None:
        on_ready(run.config.coordinator_url)
    try:
        server.run(sockets=[listener])
    finally:
        store.close()


class _Server(BoundedServer):
    """Ends long polls when it stops; otherwise each would be cut off with a failure."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        assert isinstance(self.config.app, CoordinatorApp)
        self.config.app.service.stop_waiting()
        super().handle_exit(sig, frame)


def build_run(directory: RunDirectory) -> Run:
    config = directory.config()
    settings = config.coordinator
    run = Run(
        config=config,
        descriptor=directory.descriptor(),
        keypair=directory.existing_key("coordinator"),
        secret=directory.secret(),
        role_keys=directory.role_keys(),
        submissions=directory.submissions,
        presence=Presence(time.time, settings.gone_after_s, is_shared=is_shared(settings.store)),
        bucket=open_bucket(settings.bucket, time.time),
        metrics=EventLog(directory.events / "coordinator.jsonl"),
        timing=LeaseTiming() if settings.just_in_time else None,
    )
    run.presence.relays.owners = directory.relay_keys
    trust.LossRule.of(config).require()
    run.submissions.mkdir(parents=True, exist_ok=True)
    return run


def bind(host: str, port: int, setting: str) -> socket.socket:
    """A listening socket, or one sentence about who has the port."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(WAITING_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise PortTakenError(
            f"Cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}.",
            hint=f"Stop the other program or choose another port with --{setting}.",
        ) from None
    return listener


def begin(connection: Transaction, run: Run) -> None:
    """First start: the ledger begins. Any start: every known worker counts as just seen."""
    now = run.clock()
    if meta.read(connection, "started_at") is None:
        meta.write(connection, "run_id", run.descriptor.run_id)
        meta.write(connection, "started_at", repr(now))
        ledger.append(
            connection,
            run.keypair,
            now,
            "run",
            run_id=run.descriptor.run_id,
            run_key=run.descriptor.run_key,
            secret_commitment=run.descriptor.secret_commitment,
        )
    else:
        meta.leave_out_stop(connection, now)
    _require_own_store(connection, run)
    _record_terms(connection, run)
    secrets.commit_ahead(connection, run, steps.current_id(connection))
    known = select(connection, WorkerRow, "WHERE state NOT IN ('gone','banned')")
    proven = proven_keys(connection)
    connection.on_commit(lambda: run.presence.restart((row.key for row in known), proven))


def _record_terms(connection: Connection, run: Run) -> None:
    """The settings that trust and credit follow from, so that anyone can recompute both; again whenever they change."""
    terms = {
        "trust": run.config.trust.model_dump(
            include={"stake_tokens", "probation_audits", "audit_floor", "unaudited_share"}
        ),
        "async_level": run.config.training.async_level,
        "groups_per_step": run.config.training.groups_per_step,
        "slot_tokens": run.slot_tokens,
    }
    if meta.read(connection, "terms") != json.dumps(terms):
        meta.write(connection, "terms", json.dumps(terms))
        ledger.append(connection, run.keypair, run.clock(), "terms", **terms)


def _require_own_store(connection: Connection, run: Run) -> None:
    found = meta.read(connection, "run_id")
    if found is not None and found != run.descriptor.run_id:
        raise ConfigError(
            f"The database of coordinator.store holds the run {found}, not {run.descriptor.run_id}.",
            hint="Give each run a database of its own.",
        )


def collect_leftovers(store: Store, run: Run) -> None:
    """Removes uploads that a kill cut off before their transaction, and collected ones whose removal it cut off; not those that
    another process is just taking in."""
    kept = store.read(lambda connection: {rollout.submission_id for rollout in records.kept_rollouts(connection)})
    for path in [path for path in run.submissions.iterdir() if path.stem not in kept]:
        is_arriving = run.presence.is_shared and _is_young(path, run) and not _is_recorded(store, path.stem)
        if not is_arriving:
            path.unlink(missing_ok=True)


def _is_recorded(store: Store, submission_id: str) -> bool:
    """Refused junk is collected within seconds, so its file may be as young as one that arrives."""
    sql = "WHERE submission_id=? AND collected_at IS NOT NULL"
    return store.read(lambda connection: find(connection, SubmissionRow, sql, (submission_id,))) is not None


def _is_young(path: Path, run: Run) -> bool:
    try:
        return time.time() - path.stat().st_mtime < 2 * run.config.coordinator.lease_s
    except FileNotFoundError:
        return True
