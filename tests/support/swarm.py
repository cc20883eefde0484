"""A coordinator with a clock that only tests move, and clients that reach it without a network."""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, Unpack

import httpx
import pytest
from starlette.testclient import TestClient

from shoal.config import ShoalConfig, build_config
from shoal.coordinator import housekeeping, ledger
from shoal.coordinator.batching import steps
from shoal.coordinator.http.app import create_app
from shoal.coordinator.presence import Presence
from shoal.coordinator.run import Run
from shoal.coordinator.server import begin, collect_leftovers
from shoal.coordinator.store.database import Connection, Database, PostgreSQL, SQLite
from shoal.coordinator.store.writer import Look, Store, Work
from shoal.errors import RefusedError
from shoal.files import digest_bytes
from shoal.protocol import api
from shoal.protocol.client import ClientOptions, CoordinatorClient
from shoal.protocol.signing import rewound_message
from shoal.protocol.verdicts import Reason
from support.samples import NUMERICS_CLASS, RUN_SECRET, descriptor, keypair

Result = TypeVar("Result")
ROLES = ("coordinator", "trainer", "validator", "evaluator")
TOKENS_PER_GROUP = 10
TEST_DATABASE = "SHOAL_TEST_DATABASE"
HEARTBEAT = api.HeartbeatBody(activity="generating", tokens_generated=5, bytes_received=7)

NEVER_S = 3600.0
NO_STATISTICS: Mapping[str, float] = {}
"""Between sweeps: tests sweep by hand."""


class Clock:
    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Patience:
    """The local time of a client: sleeping costs nothing but its deadline."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Bridge(httpx.BaseTransport):
    """Carries requests of the real client to the app. `lose_answers` drops that many answers on their way back."""

    def __init__(self, http: TestClient) -> None:
        self.http = http
        self.lose_answers = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self.http.request(
            request.method,
            str(request.url),
            content=request.read(),
            headers=list(request.headers.items()),
            follow_redirects=False,
        )
        if self.lose_answers:
            self.lose_answers -= 1
            raise httpx.ReadError("the answer was lost", request=request)
        return httpx.Response(answer.status_code, headers=list(answer.headers.items()), content=answer.content)


def small_config(**sections: dict[str, object]) -> ShoalConfig:
    """Batches of 2 groups, slots of 2 groups, at most 4 slots per step."""
    tree: dict[str, dict[str, object]] = {
        "run": {"steps": 3},
        "rollouts": {"group_size": 2, "tasks_per_slot": 2, "max_prompt_tokens": 16, "max_new_tokens": 40},
        "training": {"async_level": 1, "groups_per_step": 2, "oversampling": 4.0},
        "coordinator": {"lease_s": 60, "gone_after_s": 30, "max_upload_bytes": 10_000},
        "trust": {
            "probation_audits": 2,
            "stake_tokens": 30,
            "key_share": 1.0,
            "probation_share": 1.0,
            "unaudited_share": 1.0,
        },
        "validation": {"claim_s": 20, "max_tries": 3},
    }
    return build_config({name: tree.get(name, {}) | sections.get(name, {}) for name in {**tree, **sections}})


class HastySQLite(SQLite):
    """Does not wait for the disk; nobody pulls the plug of a test."""

    def connect(self) -> Connection:
        connection = super().connect()
        connection.execute("PRAGMA synchronous=OFF")
        return connection


def database_of(root: Path) -> Database:
    """A file, or, for the run of these tests on PostgreSQL, a schema of its own in that server."""
    server = os.environ.get(TEST_DATABASE, "")
    return in_own_schema(server, root) if server else HastySQLite(root / "store.db")


def in_own_schema(url: str, root: Path) -> PostgreSQL:
    schema = f"t{digest_bytes(str(root).encode())[:16]}"
    connection = PostgreSQL(url).connect()
    connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    connection.close()
    return PostgreSQL(f"{url}{'&' if '?' in url else '?'}options=-csearch_path%3D{schema}")


class Swarm:
    def __init__(self, root: Path, config: ShoalConfig, clock: Clock | None = None) -> None:
        self.root, self.clock = root, clock or Clock()
        database = database_of(root)
        self.run = Run(
            config=config,
            descriptor=descriptor(async_level=config.training.async_level, rollouts=config.rollouts),
            keypair=keypair("coordinator"),
            secret=RUN_SECRET,
            role_keys={keypair(role).public: role for role in ROLES},
            submissions=root / "submissions",
            presence=Presence(self.clock, config.coordinator.gone_after_s, is_shared=database.is_shared),
            clock=self.clock,
        )
        self.run.submissions.mkdir(parents=True, exist_ok=True)
        self.store = Store(database)
        self.store.write(lambda connection: begin(connection, self.run))
        collect_leftovers(self.store, self.run)
        sealed = self.run.descriptor.seal(keypair("run")).to_bytes()
        self.app = create_app(self.store, self.run, sealed, sweep_interval_s=NEVER_S)
        self.http = TestClient(self.app, raise_server_exceptions=False)
        self._ids = itertools.count()

    def client(self, name: str, **options: Unpack[ClientOptions]) -> CoordinatorClient:
        """The client of a role or worker; keys follow from names."""
        patience = Patience()
        chosen: ClientOptions = {
            "http": httpx.Client(transport=Bridge(self.http)),
            "deadline_s": 5.0,
            "clock": self.clock,
            "monotonic": patience,
            "sleep": patience.sleep,
            **options,
        }
        return CoordinatorClient.for_run(self.run.descriptor, keypair(name), **chosen)

    def new_id(self) -> str:
        return f"request-{next(self._ids):08}"

    def alter(self, **facts: object) -> None:
        """Changes facts that are frozen in production, as a disk that fills up does."""
        for name, value in facts.items():
            object.__setattr__(self.run, name, value)

    def write(self, work: Work[Result]) -> Result:
        return self.store.write(work)

    def read(self, work: Look[Result]) -> Result:
        return self.store.read(work)

    def one(self, sql: str, *values: object) -> dict[str, object]:
        rows = self.all(sql, *values)
        assert len(rows) == 1, rows
        return rows[0]

    def all(self, sql: str, *values: object) -> list[dict[str, object]]:
        return self.read(lambda connection: [dict(row) for row in connection.execute(sql, values)])

    def whole_ledger(self) -> bytes:
        """An export with the entries of open steps, as the owner has it."""

        def export(connection: Connection) -> bytes:
            extent = ledger.whole(connection)
            seal = ledger.seal(self.run.keypair, self.run.descriptor.run_id, extent, self.clock())
            return b"".join([*ledger.page(connection, 0, extent.entries), seal])

        return self.read(export)

    def sweep(self) -> bool:
        return self.write(lambda connection: housekeeping.maintain(connection, self.run))

    # What each role does in a healthy run

    def publish(self, version: int, digest: str = "", size_bytes: int = 100) -> api.VersionAnswer:
        epoch = self.epoch()
        digest = digest or f"{(epoch << 32) + version:064x}"
        self.record(version - 1)
        sizes = {"weights_digest": digest, "bytes_total": size_bytes}
        body = api.VersionBody.model_validate({"epoch": epoch, "version": version, "manifest_digest": digest, **sizes})
        return self.client("trainer").publish(body)

    def epoch(self) -> int:
        return self.read(steps.epoch)

    def rewind_body(
        self, version: int, *, epoch: int | None = None, audit: bool = False, key: str = "run"
    ) -> api.RewindBody:
        """As the owner would sign it now, or for another epoch, or with another key."""
        epoch = self.epoch() + 1 if epoch is None else epoch
        known = self.all("SELECT manifest_digest FROM versions WHERE version=?", version)
        digest = str(known[0]["manifest_digest"]) if known else "0" * 64
        signature = keypair(key).sign(rewound_message(self.run.descriptor.run_id, epoch, version, digest))
        facts = {"epoch": epoch, "version": version, "manifest_digest": digest, "signature": signature}
        return api.RewindBody.model_validate({**facts, "reason": "a bad step", "audit": audit})

    def rewind(self, version: int, *, audit: bool = False) -> api.RewindView:
        return self.client("run").rewind(self.rewind_body(version, audit=audit))

    def batch(self, step: int) -> api.BatchRecord | None:
        return self.client("trainer").batch(step, 0, self.epoch()).batch

    def record(self, step: int, statistics: Mapping[str, float] = NO_STATISTICS) -> api.BatchRecord | None:
        """As a trainer does that finds every group probable but those named."""
        batch = self.batch(step) if step >= 0 else None
        while batch is not None and batch.state == "proposed":
            values = {group.group_id: statistics.get(group.group_id, 0.0) for group in batch.groups}
            body = api.ScreeningBody(epoch=batch.epoch, step=step, attempt=batch.attempt, statistics=values)
            batch = self.client("trainer").screen(body)
        return batch

    def join(self, *names: str) -> list[CoordinatorClient]:
        clients = [self.client(name) for name in names]
        for name, client in zip(names, clients, strict=True):
            client.register(registration(name))
        return clients

    def ask(self, worker: CoordinatorClient, *held: int, request_id: str = "") -> api.LeaseAnswer:
        return worker.lease(api.LeaseBody(request_id=request_id or self.new_id(), held_versions=list(held)))

    def lease(self, worker: CoordinatorClient, *held: int) -> api.Lease:
        answer = self.ask(worker, *(held or range(10)))
        assert answer.lease is not None, answer
        return answer.lease

    def work(self, worker: CoordinatorClient, *held: int) -> tuple[api.Lease, str]:
        """Leases and submits; returns the lease and the submission id."""
        lease = self.lease(worker, *held)
        return lease, worker.submit(lease.lease_id, f"rollouts of {lease.lease_id}".encode()).submission_id

    def claim(self, request_id: str = "") -> api.Claim:
        answer = self.client("validator").claim(api.ClaimBody(request_id=request_id or self.new_id(), wait_s=0))
        assert answer.claim is not None
        return answer.claim

    def accept(self, claim: api.Claim | None = None, *, useful: int = 2, **changes: object) -> api.VerdictBody:
        """Accepts the next submission; its first groups are useful."""
        claim = claim or self.claim()
        return self.send_verdict(verdict_of(claim, useful=useful, **changes))

    def reject(self, *reasons: Reason, claim: api.Claim | None = None) -> api.VerdictBody:
        return self.send_verdict(verdict_of(claim or self.claim(), accepted=False, reasons=list(reasons), groups=[]))

    def send_verdict(self, body: api.VerdictBody) -> api.VerdictBody:
        assert self.client("validator").verdict(body).recorded
        return body

    def produce(self, worker: CoordinatorClient, *, useful: int = 2) -> api.Lease:
        """One slot from lease to accepted verdict."""
        lease, _ = self.work(worker)
        self.accept(useful=useful)
        return lease

    def state_of(self, name: str) -> object:
        return self.one("SELECT state FROM workers WHERE key=?", keypair(name).public)["state"]


def page_count(connection: Connection) -> int:
    """Pages of a SQLite store."""
    row = connection.execute("PRAGMA page_count").fetchone()
    assert row is not None
    pages = row["page_count"]
    assert isinstance(pages, int)
    return pages


def lossy(swarm: Swarm, name: str) -> tuple[CoordinatorClient, Bridge]:
    client = swarm.client(name)
    bridge = client._http._transport
    assert isinstance(bridge, Bridge)
    return client, bridge


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(RefusedError) as caught:
        call()
    return caught.value.code


def submission_state(swarm: Swarm, submission_id: str) -> object:
    return swarm.one("SELECT state FROM submissions WHERE submission_id=?", submission_id)["state"]


def ledger_kinds(swarm: Swarm) -> list[object]:
    return [row["kind"] for row in swarm.all("SELECT kind FROM ledger ORDER BY seq")]


def registration(name: str = "worker", **changes: object) -> api.RegisterBody:
    fields = {"name": name, "numerics_class": NUMERICS_CLASS, "tokens_per_s": 100.0}
    return api.RegisterBody.model_validate(fields | changes)


def verdict_of(claim: api.Claim, *, useful: int = 2, **changes: object) -> api.VerdictBody:
    groups = [
        api.GroupVerdict(
            group=number,
            task_id=f"task-{number}",
            useful=number < useful,
            tokens=TOKENS_PER_GROUP,
            rewards=[1.0, 0.0],
            task_rewards=[1.0, 0.0],
            samples=[f"{number:08}{sample:08}" for sample in range(2)],
        )
        for number in range(2)
    ]
    fields: dict[str, object] = {
        "claim_id": claim.claim_id,
        "submission_id": claim.submission_id,
        "accepted": True,
        "reasons": [],
        "audited_groups": claim.audit_groups,
        "groups": groups,
    }
    return api.VerdictBody.model_validate(fields | changes)


@contextmanager
def running(root: Path, config: ShoalConfig, clock: Clock | None = None) -> Iterator[Swarm]:
    swarm = Swarm(root, config, clock)
    try:
        with swarm.http:
            yield swarm
    finally:
        swarm.store.close()
