"""A request must not cost more as the run grows: every statement of the hot paths finds its rows by an index."""

from collections.abc import Callable

import pytest

from coordinator.store.test_store import tracing
from shoal.coordinator.store.database import Connection
from shoal.protocol import api
from shoal.protocol.verdicts import Reason
from support.swarm import Swarm, registration

Work = Callable[[Swarm], object]


def whole_run(swarm: Swarm) -> None:
    """Each kind of request at least once, bans, faults and batches included."""
    swarm.publish(0)
    ann, bob, eve = swarm.join("ann", "bob", "eve")
    ann.register(registration("ann"))
    ann.heartbeat(api.HeartbeatBody(activity="working"))
    swarm.lease(bob)
    bob.give_back(swarm.lease(bob).lease_id)
    swarm.work(eve)
    swarm.reject(Reason.REWARD)
    swarm.work(ann)
    swarm.reject(Reason.VALIDATOR_CRASH)
    swarm.clock.advance(5)
    swarm.accept(useful=1)
    swarm.clock.advance(20)
    ann.heartbeat(api.HeartbeatBody(activity="working"))
    swarm.sweep()
    swarm.produce(ann)
    assert swarm.client("trainer").batch(0, wait_s=0).batch is not None
    assert swarm.client("trainer").batch(1, wait_s=0).batch is None
    swarm.publish(1)
    swarm.clock.advance(31)
    swarm.sweep()
    ann.heartbeat(api.HeartbeatBody(activity="back again"))


@pytest.fixture
def statements(swarm: Swarm) -> set[str]:
    heard: set[str] = set()
    swarm.write(tracing(heard.add))
    swarm.read(tracing(heard.add))
    swarm.store.read_rows(tracing(heard.add))
    whole_run(swarm)
    swarm.write(tracing(None))
    swarm.read(tracing(None))
    swarm.store.read_rows(tracing(None))
    return {text for text in heard if text.split()[0] in ("SELECT", "UPDATE", "DELETE")}


def test_no_statement_of_a_request_scans_a_table(swarm: Swarm, statements: set[str]) -> None:
    def scans(connection: Connection) -> list[str]:
        found = []
        for text in sorted(statements):
            plan = [str(row["detail"]) for row in connection.execute(f"EXPLAIN QUERY PLAN {text}")]
            found += [f"{step}: {text}" for step in plan if step.startswith("SCAN ") and step != "SCAN CONSTANT ROW"]
        return found

    assert len(statements) > 30
    assert swarm.read(scans) == []


def test_a_lease_costs_the_same_number_of_statements_in_a_long_run(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")

    def cost_of_a_lease() -> int:
        heard: list[str] = []
        swarm.write(tracing(heard.append))
        bob.give_back(swarm.lease(bob).lease_id)
        swarm.write(tracing(None))
        return len(heard)

    before = cost_of_a_lease()
    for number in range(500):
        swarm.run.presence.seen(f"worker-{number}")
    for step in range(2):
        swarm.produce(ann)
        swarm.publish(step + 1)
    assert cost_of_a_lease() <= before + 2
