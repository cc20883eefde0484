"""The same coordinator on a real PostgreSQL, alone and as several processes behind one run."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from coordinator.test_server import run_directory
from shoal.coordinator.store.database import PostgreSQL
from shoal.coordinator.store.schema import SchemaError, schema_version
from shoal.coordinator.store.writer import Store, StoreError
from shoal.errors import ConfigError, RefusedError
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from support.postgres import is_installed, postgres_server
from support.samples import keypair
from support.swarm import TEST_DATABASE, Clock, Swarm, in_own_schema, registration, running, small_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="PostgreSQL is not installed: run `make system`"),
]
HERE = Path(__file__).parents[1]
PATIENCE_S = 120
SUITE = [
    "batching",
    "http/test_authentication.py",
    "http/test_hostile_requests.py",
    "http/test_openapi.py",
    "http/test_registrations.py",
    "http/test_uploads.py",
    "ledger",
    "test_control.py",
    "test_lifecycle.py",
    "test_views.py",
    "test_workers.py",
    "work",
]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.fixture
def database(server: str, tmp_path: Path) -> PostgreSQL:
    return in_own_schema(server, tmp_path)


def test_what_holds_on_sqlite_holds_on_postgresql(server: str) -> None:
    command = [sys.executable, "-m", "pytest", "-n", "0", *(str(HERE / name) for name in SUITE)]
    done = subprocess.run(command, env=os.environ | {TEST_DATABASE: server}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 150


def test_a_refused_write_leaves_no_trace_and_a_committed_one_is_seen_by_another_process(database: PostgreSQL) -> None:
    ours, theirs = Store(database), Store(database)
    ours.write(lambda connection: connection.execute("INSERT INTO meta VALUES ('a', '1')"))

    def refuse(connection: object) -> None:
        connection.execute("INSERT INTO meta VALUES ('b', '1')")  # type: ignore[attr-defined]
        raise RefusedError("no", "Not like this.")

    with pytest.raises(RefusedError):
        ours.write(refuse)
    with pytest.raises(Exception, match="duplicate key"):
        theirs.write(lambda connection: connection.execute("INSERT INTO meta VALUES ('a', '2')"))
    rows = theirs.read(lambda connection: connection.execute("SELECT * FROM meta").fetchall())
    assert rows == [{"name": "a", "value": "1"}]
    ours.close()
    theirs.close()


def test_processes_that_start_at_once_make_the_schema_once(database: PostgreSQL) -> None:
    with ThreadPoolExecutor(6) as pool:
        stores = list(pool.map(lambda _: Store(database), range(6)))
    assert {store.read(database.schema_version) for store in stores} == {schema_version()}
    stores[0].write(lambda connection: database.set_schema_version(connection, 99))
    for store in stores:
        store.close()
    with pytest.raises(SchemaError, match="newer release"):
        Store(database)


def test_a_lost_connection_fails_what_was_under_way_and_is_made_again(database: PostgreSQL) -> None:
    store, other = Store(database), Store(database)
    kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type='client backend'"
    store.write(lambda connection: connection.execute("SELECT 1 AS n").fetchone())
    store.read(lambda connection: connection.execute("SELECT 1 AS n").fetchone())
    other.write(lambda connection: connection.execute(kill).fetchall())
    with pytest.raises(StoreError, match="cannot be written"):
        store.write(lambda connection: connection.execute("INSERT INTO meta VALUES ('lost', '')"))
    store.write(lambda connection: connection.execute("INSERT INTO meta VALUES ('kept', '')"))
    with pytest.raises(StoreError, match="cannot be read"):
        store.read(lambda connection: connection.execute("SELECT 1 AS n").fetchone())
    names = store.read(lambda connection: [row["name"] for row in connection.execute("SELECT name FROM meta")])
    assert names == ["kept"]
    store.close()
    other.close()


def test_a_wrong_address_and_another_runs_database_are_named(database: PostgreSQL, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a PostgreSQL URL"):
        PostgreSQL("postgresql://[::1/")
    store = Store(database)
    store.write(lambda connection: connection.execute("INSERT INTO meta VALUES ('started_at','1'), ('run_id','other')"))
    store.close()
    os.environ[TEST_DATABASE] = ""
    from shoal.coordinator.server import begin

    swarm_root = tmp_path / "swarm"
    with running(swarm_root, small_config()) as swarm:
        other = Store(database)
        with pytest.raises(ConfigError, match="holds the run other"):
            other.write(lambda connection: begin(connection, swarm.run))
        other.close()


@contextmanager
def two_coordinators(server: str, tmp_path: Path) -> Iterator[tuple[Swarm, Swarm]]:
    """Two memories over one database and one directory of rollouts, as two processes have them."""
    before, clock = os.environ.get(TEST_DATABASE), Clock()
    os.environ[TEST_DATABASE] = server
    try:
        with running(tmp_path, small_config(), clock) as one, running(tmp_path, small_config(), clock) as other:
            yield one, other
    finally:
        os.environ[TEST_DATABASE] = before or ""


def test_a_heartbeat_heard_by_one_keeps_the_worker_alive_for_the_other(server: str, tmp_path: Path) -> None:
    with two_coordinators(server, tmp_path) as (one, other):
        one.publish(0)
        ann = one.client("ann")
        ann.register(registration("ann"))
        lease = one.lease(ann)
        for _ in range(8):
            one.clock.advance(6)
            ann.heartbeat(api.HeartbeatBody(activity="generating"))
            one.sweep()
            other.sweep()
        assert other.state_of("ann") == one.state_of("ann") != "gone"
        assert other.run.presence.workers[keypair("ann").public].activity == "generating"
        relay = api.RelayBody(url="http://relay:1", newest_version=3)
        one.client("relay").announce_relay(relay)
        one.clock.advance(6)
        one.sweep()
        other.sweep()
        assert [view.url for view in other.client("ann").relays().relays] == ["http://relay:1"]
        one.clock.advance(31)
        other.sweep()
        assert one.state_of("ann") == "gone"
        assert other.one("SELECT state FROM leases WHERE lease_id=?", lease.lease_id)["state"] in (
            "abandoned",
            "expired",
        )


def test_a_request_seen_by_one_is_refused_by_the_other(server: str, tmp_path: Path) -> None:
    with two_coordinators(server, tmp_path) as (one, other):
        body = registration("ann").model_dump_json().encode()
        headers = one.client("ann")._headers("POST", "/v1/workers", body, None)
        deadline = time.monotonic() + PATIENCE_S
        while (answer := one.http.post("/v1/workers", content=body, headers=headers)).status_code == 503:
            assert time.monotonic() < deadline, (
                answer.text
            )  # a slow database refuses, keeps nothing, and may be asked again
        assert answer.status_code == 200
        answer = other.http.post("/v1/workers", content=body, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (409, "replay")


def test_a_long_poll_at_one_hears_of_an_upload_at_the_other(server: str, tmp_path: Path) -> None:
    with two_coordinators(server, tmp_path) as (one, other):
        one.publish(0)
        (ann,) = one.join("ann")
        lease = one.lease(ann)
        with ThreadPoolExecutor(1) as pool:
            claim = api.ClaimBody(request_id="request-1", wait_s=30)
            waiting = pool.submit(other.client("validator", deadline_s=60.0).claim, claim)
            deadline = time.monotonic() + PATIENCE_S
            while not other.all("SELECT 1 AS n FROM nonces WHERE key=?", keypair("validator").public):
                assert time.monotonic() < deadline, "the validator's request did not arrive"
            started = time.monotonic()
            ann.submit(lease.lease_id, b"rollouts")
            answer = waiting.result(PATIENCE_S)
        assert answer.claim is not None
        assert time.monotonic() - started < 25, "it was not woken but timed out"


@contextmanager
def coordinator_process(root: Path, port: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    script = (
        "import sys; from pathlib import Path; from shoal.rundir import RunDirectory;"
        "from shoal.coordinator import run_coordinator;"
        "run_coordinator(RunDirectory(Path(sys.argv[1])), on_ready=lambda url: print('ready', flush=True))"
    )
    command = [sys.executable, "-c", script, str(root)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.stderr.read() if process.stderr else ""
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def test_several_processes_give_each_slot_once_though_one_is_killed(server: str, tmp_path: Path) -> None:
    from broadcast.test_static_servers import free_port

    url = f"{server}&options=-csearch_path%3Dmany"
    connection = PostgreSQL(server).connect()
    connection.execute("CREATE SCHEMA many")
    connection.close()
    workers, rounds, count = 12, 6, 3
    ports = [free_port() for _ in range(count)]
    with ExitStack() as stack:
        members = []
        for number, port in enumerate(ports):
            config = small_config(
                coordinator={"store": url, "port": port, "max_upload_bytes": 10_000},
                training={"groups_per_step": 1000},
                trust={"stake_tokens": 100_000, "key_share": 1.0, "probation_share": 1.0},
            )
            directory = run_directory(tmp_path / f"host-{number}", config)
            members.append(stack.enter_context(coordinator_process(directory.root, port)))
        urls = [address for _, address in members]
        descriptor = directory.descriptor()

        def client(name: str, address: str) -> CoordinatorClient:
            return CoordinatorClient.for_run(descriptor, keypair(name), address, deadline_s=PATIENCE_S)

        digest = "0" * 64
        trainer = CoordinatorClient.for_run(descriptor, directory.key("trainer"), urls[0], deadline_s=PATIENCE_S)
        trainer.publish(api.VersionBody(version=0, manifest_digest=digest, weights_digest=digest, bytes_total=1))
        killed = threading.Event()
        granted: list[tuple[int, int]] = []

        def work(number: int) -> None:
            name = f"worker-{number}"
            client(name, urls[number % count]).register(registration(name))
            for turn in range(rounds):
                alive = count - 1 if killed.is_set() else count
                here = client(name, urls[(number + turn) % alive])
                try:
                    answer = here.lease(api.LeaseBody(request_id=f"{name}-{turn:04}", held_versions=[0]))
                except Exception:
                    if not killed.is_set():
                        raise
                    here = client(name, urls[0])  # the same request, asked again elsewhere
                    answer = here.lease(api.LeaseBody(request_id=f"{name}-{turn:04}", held_versions=[0]))
                assert answer.lease is not None, answer
                granted.append((answer.lease.step, answer.lease.slot))
                client(name, urls[number % (count - 1)]).submit(answer.lease.lease_id, name.encode() * 3)
                if len(granted) == workers * rounds // 2:
                    killed.set()
                    members[-1][0].send_signal(signal.SIGKILL)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, range(workers)))
        status = client("worker-0", urls[0]).status()
        export = client("worker-0", urls[1]).ledger_export()
    assert killed.is_set()
    assert max(Counter(granted).values()) == 1
    assert len(granted) == workers * rounds
    assert status.submissions_pending == workers * rounds
    from shoal.coordinator import verify_export

    entries, _ = verify_export(export.splitlines(), descriptor.coordinator_key)
    assert not any(entry.kind == "registered" for entry in entries)  # nothing was accepted yet
