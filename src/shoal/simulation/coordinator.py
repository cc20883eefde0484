"""The real coordinator without HTTP: its operations on a database in memory and on an event clock.

Every decision is made by the code that a run uses. Requests are not signed, because nobody but the scenario can send one.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from shoal.config import ShoalConfig
from shoal.coordinator import housekeeping, workers
from shoal.coordinator.batching import screening, steps
from shoal.coordinator.batching.timing import LeaseTiming
from shoal.coordinator.presence import Presence
from shoal.coordinator.rules.deliveries import Pace
from shoal.coordinator.run import Run
from shoal.coordinator.server import begin
from shoal.coordinator.store.database import SQLite, Transaction
from shoal.coordinator.store.rows import find, select
from shoal.coordinator.store.schema import migrate
from shoal.coordinator.store.tables import GroupRow, WorkerRow
from shoal.coordinator.store.writer import Savepoint
from shoal.coordinator.work import deliveries, leasing, submissions, verdicts
from shoal.files import digest_bytes
from shoal.identity import Keypair
from shoal.protocol import api
from shoal.protocol.descriptor import FileReference, RunDescriptor
from shoal.protocol.signing import PROTOCOL_VERSION
from shoal.protocol.steps import secret_commitment
from shoal.simulation.operations import TrainedGroup

Result = TypeVar("Result")
NUMERICS_CLASS = "torch/float32/cpu"
NO_DIGEST = "00" * 32


def _descriptor(config: ShoalConfig, key: str, secret: bytes) -> RunDescriptor:
    return RunDescriptor(
        run_id="simulation",
        protocol=PROTOCOL_VERSION,
        run_key=key,
        coordinator_key=key,
        coordinator_url="http://simulation",
        relay_urls=(),
        model_files={"config.json": FileReference(digest=NO_DIGEST, bytes=1)},
        tasks=config.tasks,
        task_set_digest=NO_DIGEST,
        task_count=1,
        rollouts=config.rollouts,
        reward=config.reward,
        async_level=config.training.async_level,
        chunk_tokens=32,
        top_k=128,
        numerics_classes=(NUMERICS_CLASS,),
        secret_commitment=secret_commitment(secret),
    )


class LocalCoordinator:
    def __init__(self, config: ShoalConfig, clock: Callable[[], float], secret: bytes) -> None:
        self.config = config
        keypair = Keypair.from_seed(secret)
        self.run = Run(
            config=config,
            descriptor=_descriptor(config, keypair.public, secret),
            keypair=keypair,
            secret=secret,
            role_keys={},
            submissions=Path(),
            presence=Presence(clock, config.coordinator.gone_after_s),
            clock=clock,
            free_bytes=lambda _: 1 << 40,
            timing=LeaseTiming() if config.coordinator.just_in_time else None,
        )
        self.database = SQLite(Path(":memory:"))
        self.connection = self.database.connect()
        migrate(self.connection, self.database)
        self._write(lambda connection: begin(connection, self.run))

    def _write(self, work: Callable[[Transaction], Result]) -> Result:
        """One transaction, as the store makes it."""
        transaction = Savepoint(self.connection)
        self.database.begin_write(self.connection)
        try:
            result = work(transaction)
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")
        for effect in transaction.effects:
            effect()
        return result

    def register(self, key: str, tokens_per_s: float = 1e6) -> None:
        body = api.RegisterBody(name=key[:8], numerics_class=NUMERICS_CLASS, tokens_per_s=tokens_per_s)
        self._write(lambda connection: workers.register(connection, self.run, key, body))

    def lease(self, key: str, request_id: str, held_versions: Sequence[int]) -> api.LeaseAnswer:
        body = api.LeaseBody(request_id=request_id, held_versions=list(held_versions))
        return self._write(lambda connection: leasing.lease(connection, self.run, key, body))

    def give_back(self, key: str, lease_id: str) -> None:
        self._write(lambda connection: leasing.give_back(connection, self.run, key, lease_id))

    def submit(self, key: str, lease_id: str, content: bytes) -> None:
        name, digest = digest_bytes(lease_id.encode())[:32], digest_bytes(content)
        file = submissions.ReceivedFile(key, lease_id, name, digest, len(content), "")
        self._write(lambda connection: submissions.accept_upload(connection, self.run, file))

    def beat(self, keys: Iterable[str]) -> None:
        """The keys send a heartbeat; that of a banned one is refused."""
        banned = {row.key for row in select(self.connection, WorkerRow, "WHERE state='banned'")}
        for key in keys:
            if key not in banned:
                self.run.presence.seen(key)

    def leave(self, key: str) -> None:
        """The store learns of it by silence."""

    def rejoin(self, key: str) -> None:
        self._write(lambda connection: workers.mark_seen(connection, self.run, key))

    def claim(self, validator: str, request_id: str) -> api.Claim | None:
        body = api.ClaimBody(request_id=request_id, wait_s=0)
        return self._write(lambda connection: submissions.claim(connection, self.run, validator, body)).claim

    def verdict(self, body: api.VerdictBody) -> bool:
        return self._write(lambda connection: verdicts.record_verdict(connection, self.run, body))

    def record(self, step: int, statistics: Callable[[str], float] = lambda group_id: 0.0) -> api.BatchRecord:
        """Screens the proposed batch, as a trainer does, until it is recorded."""
        batch = self.batch(step)
        assert batch is not None, "the step has a batch"
        while batch.state == "proposed":
            values = {group.group_id: statistics(group.group_id) for group in batch.groups}
            body = api.ScreeningBody(step=step, attempt=batch.attempt, statistics=values)
            batch = self._write(lambda connection: screening.screen(connection, self.run, body))  # noqa: B023
        return batch

    def publish(self, version: int, stage_s: float = 0.0, waited_s: float = 0.0, size_bytes: int = 1) -> None:
        digest = f"{version:064x}"
        body = api.VersionBody(
            version=version,
            manifest_digest=digest,
            weights_digest=digest,
            bytes_total=size_bytes,
            report={"time_stage_s": stage_s, "time_wait_batch_s": waited_s},
        )
        self._write(lambda connection: steps.publish(connection, self.run, body))

    def maintain(self) -> None:
        self._write(lambda connection: housekeeping.maintain(connection, self.run))

    def step(self) -> int:
        """The current step: as many batches are formed."""
        return steps.current_step(self.connection)

    def batch(self, step: int) -> api.BatchRecord | None:
        return steps.batch_record(self.connection, step)

    def is_reliable(self, key: str) -> bool:
        """Whether batches wait for the slots of this key."""
        observed = deliveries.observe(self.connection, self.run)
        return observed.is_reliable(self.run, workers.known_worker(self.connection, key))

    def pace(self) -> Pace:
        return deliveries.observe(self.connection, self.run).pace

    def trained(self, step: int) -> list[TrainedGroup]:
        batch = self.batch(step)
        return [self._trained_group(group) for group in batch.groups] if batch is not None else []

    def _trained_group(self, group: api.BatchGroup) -> TrainedGroup:
        row = find(self.connection, GroupRow, "WHERE group_id=?", (group.group_id,))
        assert row is not None, "a batch holds groups of the store"
        return TrainedGroup(group.submission_id, row.worker, group.policy_version, row.tokens, group.task_rewards[0])

    def close(self) -> None:
        self.connection.close()
