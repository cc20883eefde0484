"""Swarms in which keys deliver, are late, and fill one slot twice; the clock moves only by hand."""

from functools import partial

from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.tables import SubmissionRow
from shoal.coordinator.work.submissions import ReceivedFile, new_submission
from shoal.coordinator.workers import require_worker
from shoal.files import digest_bytes
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from support.swarm import Swarm, small_config, verdict_of

WORK_S = 4.0
NAMES = ("ann", "bob", "cho", "dan", "eve")
CONFIG = small_config(
    run={"steps": 400},
    training={"groups_per_step": 8, "async_level": 2},
    coordinator={"lease_s": 60, "gone_after_s": 600},
)


def formed(swarm: Swarm) -> int:
    return len(swarm.all("SELECT step FROM batches"))


def ask(swarm: Swarm, worker: CoordinatorClient) -> api.LeaseAnswer:
    """A request of a worker that holds all recent versions."""
    return swarm.ask(worker, *range(max(0, formed(swarm) - 5), formed(swarm) + 1))


def take(swarm: Swarm, worker: CoordinatorClient) -> api.Lease:
    lease = ask(swarm, worker).lease
    assert lease is not None
    return lease


def publish_all(swarm: Swarm) -> None:
    newest = swarm.one("SELECT MAX(version) AS n FROM versions")["n"]
    assert isinstance(newest, int)
    for version in range(newest + 1, formed(swarm) + 1):
        swarm.publish(version)


def work_round(swarm: Swarm, workers: list[CoordinatorClient], work_s: float = WORK_S) -> None:
    """Every worker takes a slot and delivers it after the same time."""
    leases = [(worker, ask(swarm, worker).lease) for worker in workers]
    swarm.clock.advance(work_s)
    for worker, lease in leases:
        if lease is not None:
            worker.submit(lease.lease_id, lease.lease_id.encode())
            swarm.accept()
    swarm.sweep()
    publish_all(swarm)


def proven_swarm(swarm: Swarm, *names: str) -> list[CoordinatorClient]:
    """Workers that have delivered in time for a while."""
    swarm.publish(0)
    workers = swarm.join(*names)
    for _ in range(12):
        work_round(swarm, workers)
    return workers


def backup_of(swarm: Swarm, lease: api.Lease, workers: list[CoordinatorClient]) -> tuple[CoordinatorClient, api.Lease]:
    """Lets the holder be late, and the others ask until one of them gets the slot too."""
    swarm.clock.advance(1.5 * WORK_S + 1)
    for _ in range(3):
        for worker in workers:
            again = ask(swarm, worker).lease
            if again is not None and (again.step, again.slot) == (lease.step, lease.slot):
                return worker, again
            if again is not None:
                worker.submit(again.lease_id, again.lease_id.encode())
        swarm.clock.advance(0.25)
    raise AssertionError("nobody got the slot")


def drain(swarm: Swarm) -> None:
    """Accepts everything that was uploaded."""
    validator = swarm.client("validator")
    while (claim := validator.claim(api.ClaimBody(request_id=swarm.new_id(), wait_s=0)).claim) is not None:
        swarm.accept(claim)


def other_samples(claim: api.Claim, changed: int) -> list[api.GroupVerdict]:
    """Groups with the same lengths and rewards, but other tokens in the first samples."""
    groups = []
    for group in verdict_of(claim).groups:
        ours = min(changed, len(group.samples))
        changed -= ours
        samples = [*(["f" * 16] * ours), *group.samples[ours:]]
        groups.append(group.model_copy(update={"samples": samples}))
    return groups


def _drawn_now(connection: Connection, swarm: Swarm, file: ReceivedFile) -> SubmissionRow:
    return new_submission(connection, swarm.run, require_worker(connection, file.worker), file, 0)


def undrawn(swarm: Swarm, worker: CoordinatorClient, lease: api.Lease, name: str) -> bytes:
    """Bytes of a file that the draw of this moment does not audit."""
    assert worker.keypair is not None
    for number in range(1000):
        data = f"{name} {number}".encode()
        file = ReceivedFile(worker.keypair.public, lease.lease_id, "file", digest_bytes(data), len(data), "")
        if not swarm.read(partial(_drawn_now, swarm=swarm, file=file)).groups_to_audit:
            return data
    raise AssertionError("every file is audited")


def two_files(swarm: Swarm, changed: int, flips_allowed: int) -> tuple[api.Lease, str, str]:
    """Two keys fill one slot, unaudited; `changed` samples of the second have other tokens with the same length and reward."""
    *honest, eve = proven_swarm(swarm, *NAMES)
    lease = take(swarm, eve)
    worker, again = backup_of(swarm, lease, honest)
    drain(swarm)
    first = eve.submit(lease.lease_id, undrawn(swarm, eve, lease, "first")).submission_id
    swarm.accept(flips_allowed=flips_allowed)
    second = worker.submit(again.lease_id, undrawn(swarm, worker, again, "second")).submission_id
    claim = swarm.claim()
    swarm.accept(claim, groups=other_samples(claim, changed), flips_allowed=flips_allowed)
    return lease, first, second
