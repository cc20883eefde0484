"""No key holds up a step: stallers, keys that return or spoil their slots late, and keys that claim a speed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.verdicts import Reason
from support.samples import keypair
from support.swarm import HEARTBEAT, Swarm, running, small_config

WORK_S = 4.0
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


def deferred_slots(swarm: Swarm, name: str) -> list[object]:
    key = keypair(name).public
    sql = "SELECT deferred FROM slots JOIN leases USING (step, slot) WHERE leases.worker=? AND leases.state='leased'"
    return [row["deferred"] for row in swarm.all(sql, key)]


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Swarm]:
    with running(tmp_path, CONFIG) as swarm:
        yield swarm


def test_a_new_key_that_never_submits_holds_up_no_step(busy: Swarm) -> None:
    honest = proven_swarm(busy, "ann", "bob", "cho", "dan")
    before = formed(busy)
    for _ in range(6):
        work_round(busy, honest)
    usual = formed(busy) - before
    (staller,) = busy.join("staller")
    before = formed(busy)
    for _ in range(6):
        ask(busy, staller)
        work_round(busy, honest)
    assert formed(busy) - before >= usual


@pytest.mark.parametrize("stallers", [3, 10])
def test_slots_of_stallers_are_not_waited_for_however_many(busy: Swarm, stallers: int) -> None:
    honest = proven_swarm(busy, "ann", "bob", "cho", "dan")
    hostile = busy.join(*(f"staller-{number}" for number in range(stallers)))
    before = formed(busy)
    for _ in range(6):
        for staller in hostile:
            ask(busy, staller)
        work_round(busy, honest)
    assert formed(busy) - before >= 4


def test_a_key_without_a_record_works_for_the_next_step_in_slot_order(busy: Swarm) -> None:
    honest = proven_swarm(busy, "ann", "bob", "cho", "dan")
    (new,) = busy.join("new")
    lease = take(busy, new)
    assert deferred_slots(busy, "new") == [1]
    new.submit(lease.lease_id, b"early")
    busy.accept()
    for _ in range(4):
        work_round(busy, honest)
    assert formed(busy) > lease.step + 1
    sql = "SELECT state, batch_step, position FROM groups WHERE group_id=?"
    group = busy.one(sql, f"{lease.step}/{lease.slot}/0")
    assert group == {"state": "consumed", "batch_step": lease.step + 1, "position": 0}


def test_three_deliveries_in_time_put_a_key_on_the_critical_path(busy: Swarm) -> None:
    honest = proven_swarm(busy, "ann", "bob", "cho", "dan")
    (new,) = busy.join("new")
    for _ in range(20):
        work_round(busy, [new, *honest])
    rows = busy.all("SELECT deferred FROM slots JOIN leases USING (step, slot) WHERE leases.worker=?"
                    " ORDER BY leases.issued_at", keypair("new").public)  # fmt: skip
    assert [row["deferred"] for row in rows[:4]] == [1, 1, 1, 0]


def test_a_slow_machine_gets_leases_that_it_can_finish_and_holds_up_nobody(busy: Swarm) -> None:
    honest = proven_swarm(busy, "ann", "bob", "cho", "dan")
    (slow,) = busy.join("slow")
    delivered, began = 0, formed(busy)
    for _ in range(6):
        lease = ask(busy, slow).lease
        for _ in range(10):
            work_round(busy, honest)
            slow.heartbeat(HEARTBEAT)
        if lease is not None and lease.expires_at > busy.clock():
            slow.submit(lease.lease_id, lease.lease_id.encode())
            busy.accept()
            delivered += 1
    assert delivered >= 2
    assert formed(busy) - began >= 40


def test_a_staller_that_earned_its_place_loses_it(busy: Swarm) -> None:
    *honest, eve = proven_swarm(busy, "ann", "bob", "cho", "dan", "eve")
    for _ in range(8):
        while ask(busy, eve).lease is not None:
            pass
        for _ in range(4):
            work_round(busy, honest)
    rows = busy.all(
        "SELECT deferred FROM slots JOIN leases USING (step, slot) WHERE leases.worker=? AND leases.state='expired'"
        " ORDER BY leases.issued_at",
        keypair("eve").public,
    )
    assert [row["deferred"] for row in rows[:2]] == [0, 0]
    assert len(rows) > 2
    assert {row["deferred"] for row in rows[2:]} == {1}


def test_give_backs_count_over_steps(busy: Swarm) -> None:
    honest = proven_swarm(busy, "ann", "bob", "cho", "dan")
    (eve,) = busy.join("eve")
    seen = 0
    for _ in range(40):
        if lease := ask(busy, eve).lease:
            eve.give_back(lease.lease_id)
            seen += 1
        work_round(busy, honest)
    assert formed(busy) >= 30, "many steps went by"
    assert seen <= 8


def test_a_lease_that_is_given_back_or_spoiled_at_the_last_second_costs_its_key(busy: Swarm) -> None:
    proven_swarm(busy, "ann", "bob", "cho", "dan")
    (eve,) = busy.join("eve")
    lease = take(busy, eve)
    busy.clock.advance(9.9)
    eve.give_back(lease.lease_id)
    other = take(busy, eve)
    eve.submit(other.lease_id, b"junk")
    busy.reject(Reason.LOGPROBS)
    record = busy.one("SELECT failures, missed FROM workers WHERE key=?", keypair("eve").public)
    assert record["failures"] == 2


def test_the_record_of_deliveries_outlives_a_restart(tmp_path: Path) -> None:
    with running(tmp_path, CONFIG) as swarm:
        proven_swarm(swarm, "ann", "bob")
        record = "SELECT key, in_time, missed, work_s FROM workers ORDER BY key"
        before, clock = swarm.all(record), swarm.clock
    with running(tmp_path, CONFIG, clock) as swarm:
        assert swarm.all(record) == before
        assert before[0]["work_s"] == WORK_S
        (new,) = swarm.join("new")
        take(swarm, new)
        assert deferred_slots(swarm, "new") == [1]


def test_while_no_reliable_key_is_left_every_key_counts(busy: Swarm) -> None:
    proven_swarm(busy, "ann", "bob")
    busy.clock.advance(700)
    busy.sweep()
    (new,) = busy.join("new")
    take(busy, new)
    assert deferred_slots(busy, "new") == [0]


def test_a_reliable_key_that_only_sends_heartbeats_does_not_keep_others_off_the_critical_path(busy: Swarm) -> None:
    (idler,) = proven_swarm(busy, "idler")
    (new,) = busy.join("new")
    before = formed(busy)
    for _ in range(30):
        idler.heartbeat(HEARTBEAT)
        work_round(busy, [new])
    assert formed(busy) - before >= 3


def test_a_quarantined_key_is_never_waited_for(busy: Swarm) -> None:
    proven_swarm(busy, "ann", "bob", "cho", "eve")
    busy.write(
        lambda connection: connection.execute("UPDATE workers SET state='quarantined', anomalies=3 WHERE name='eve'")
    )
    eve = busy.client("eve")
    take(busy, eve)
    assert deferred_slots(busy, "eve") == [1]
