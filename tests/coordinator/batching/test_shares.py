"""How the slots of a step are shared by keys, proven ones and those on probation."""

from pathlib import Path

from shoal.coordinator.work import leasing
from shoal.protocol.client import CoordinatorClient
from support.samples import keypair
from support.swarm import HEARTBEAT, Swarm, running, small_config


def test_one_key_fills_its_share_and_no_more_beside_other_workers(tmp_path: Path) -> None:
    config = small_config(trust={"key_share": 0.5}, training={"groups_per_step": 8})
    with running(tmp_path, config) as swarm:
        swarm.publish(0)
        ann, bob = swarm.join("ann", "bob")
        swarm.lease(bob)
        while (lease := swarm.ask(ann, 0).lease) is not None:
            ann.submit(lease.lease_id, lease.lease_id.encode())
        planned = 10  # 1.25 × 8 groups at a useful share of one half, two per slot
        filled = swarm.one("SELECT COUNT(*) AS n FROM leases WHERE worker=?", keypair("ann").public)["n"]
        assert filled == planned / 2
        assert swarm.ask(bob, 0).lease is not None


def test_a_key_that_only_sends_heartbeats_cannot_stall_the_swarm(tmp_path: Path) -> None:
    config = small_config(trust={"key_share": 0.5, "probation_share": 0.5}, training={"groups_per_step": 8})
    with running(tmp_path, config) as swarm:
        swarm.publish(0)
        ann, idler = swarm.join("ann", "idler")
        idler.heartbeat(HEARTBEAT)
        for _ in range(4):
            swarm.produce(ann)
        assert swarm.client("trainer").batch(0, wait_s=0).batch is not None


def test_shares_that_do_not_add_up_slow_a_step_but_never_stall_it(tmp_path: Path) -> None:
    config = small_config(trust={"key_share": 0.01}, training={"groups_per_step": 8})
    with running(tmp_path, config) as swarm:
        swarm.publish(0)
        ann, bob = swarm.join("ann", "bob")
        swarm.produce(bob)
        lease = swarm.lease(ann)
        assert swarm.ask(ann, 0).reason == swarm.ask(bob, 0).reason == "no_work"
        ann.submit(lease.lease_id, b"rollouts")
        assert swarm.ask(ann, 0).reason == swarm.ask(bob, 0).reason == "no_work"
        swarm.accept()
        assert swarm.ask(bob, 0).lease is not None
        assert swarm.ask(ann, 0).reason == "no_work"


def test_keys_on_probation_share_what_proven_ones_leave(tmp_path: Path) -> None:
    config = small_config(
        trust={"probation_share": 0.25, "probation_audits": 1}, training={"groups_per_step": 8, "oversampling": 8.0}
    )
    with running(tmp_path, config) as swarm:
        swarm.publish(0)
        proven, *newcomers = swarm.join("proven", "new-1", "new-2", "new-3")
        swarm.produce(proven, useful=0)
        assert swarm.state_of("proven") == "active"
        swarm.lease(proven)
        granted = [answer.lease for new in newcomers for _ in range(2) if (answer := swarm.ask(new, 0)).lease]
        planned = swarm.one("SELECT COUNT(*) AS n FROM slots")["n"]
        assert 1 <= len(granted) <= 4
        assert planned == 2 + len(granted)
        assert swarm.ask(proven, 0).lease is not None


def test_work_means_a_lease_granted_lately_to_somebody_who_is_present(swarm: Swarm) -> None:
    def works_beside(name: str, *, active: bool = False) -> bool:
        key = keypair(name).public
        return swarm.read(lambda connection: leasing.has_other_workers(connection, swarm.run, key, active=active))

    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    assert not works_beside("ann")
    swarm.write(lambda connection: connection.execute("UPDATE workers SET state='active' WHERE name='ann'"))
    swarm.lease(ann)
    assert not works_beside("ann", active=True)
    assert works_beside("bob", active=True)
    swarm.lease(bob)
    assert works_beside("ann")
    assert not works_beside("ann", active=True)
    swarm.clock.advance(31)
    assert not works_beside("ann")
    bob.heartbeat(HEARTBEAT)
    assert works_beside("ann")
    swarm.clock.advance(30)
    bob.heartbeat(HEARTBEAT)
    assert not works_beside("ann")


def test_one_who_works_is_found_behind_many_who_left(swarm: Swarm) -> None:
    swarm.publish(0)
    swarm.join("ann")
    (bob,) = swarm.join("bob")
    swarm.lease(bob)
    row = swarm.one("SELECT * FROM leases")
    for number in range(40):
        copy = row | {"lease_id": f"lease-{number}", "worker": f"left-{number}"}
        swarm.write(
            lambda connection, copy=copy: connection.execute(  # type: ignore[misc]
                f"INSERT INTO leases ({','.join(copy)}) VALUES ({','.join('?' * len(copy))})", tuple(copy.values())
            )
        )
    key = keypair("ann").public
    assert swarm.read(lambda connection: leasing.has_other_workers(connection, swarm.run, key, active=False))


def taken_at_once(swarm: Swarm, worker: CoordinatorClient) -> list[str]:
    """Takes as many leases as there are."""
    found: list[str] = []
    while (lease := swarm.ask(worker, 0).lease) is not None:
        found.append(lease.lease_id)
        swarm.clock.advance(0.1)  # nobody may ask faster for long
    return found


def deliver(swarm: Swarm, worker: CoordinatorClient, leases: list[str]) -> None:
    for lease_id in leases:
        worker.submit(lease_id, lease_id.encode())
        swarm.accept(useful=0)


def test_a_key_may_hold_more_leases_the_more_it_works_on_at_once(tmp_path: Path) -> None:
    config = small_config(training={"groups_per_step": 200, "oversampling": 10.0})
    with running(tmp_path, config) as swarm:
        swarm.publish(0)
        (large,) = swarm.join("large")
        held = []
        for _ in range(8):
            leases = taken_at_once(swarm, large)
            held.append(len(leases))
            swarm.clock.advance(10.0)
            deliver(swarm, large, leases)
        assert held[0] == 2
        assert held == sorted(held)
        assert held[-1] >= 16


def test_a_key_that_works_on_one_slot_after_the_other_holds_two_leases(tmp_path: Path) -> None:
    config = small_config(training={"groups_per_step": 200, "oversampling": 10.0})
    with running(tmp_path, config) as swarm:
        swarm.publish(0)
        (small,) = swarm.join("small")
        for _ in range(12):
            lease = swarm.lease(small)
            swarm.clock.advance(10.0)
            deliver(swarm, small, [lease.lease_id])
        assert len(taken_at_once(swarm, small)) == 2
