"""A key cannot choose the version that it works with, nor its slots, for nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.backups import CONFIG, ask, formed, proven_swarm, take, work_round
from support.samples import keypair
from support.swarm import HEARTBEAT, Swarm, running, small_config


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Swarm]:
    with running(tmp_path, CONFIG) as swarm:
        yield swarm


def test_a_key_that_names_only_the_oldest_version_gets_nothing_once_others_use_the_newest(busy: Swarm) -> None:
    *honest, eve = proven_swarm(busy, "ann", "bob", "cho", "dan", "eve")
    for _ in range(3):
        work_round(busy, honest)
    oldest = formed(busy) - 2
    busy.clock.advance(10)
    for worker in honest:
        worker.heartbeat(HEARTBEAT)
    refused = busy.ask(eve, oldest)
    assert (refused.reason, refused.wanted_version) == ("need_weights", formed(busy))
    assert busy.ask(eve, oldest, formed(busy)).lease is not None


def test_a_version_that_was_just_published_is_not_demanded_yet(busy: Swarm) -> None:
    ann, *others = proven_swarm(busy, "ann", "bob", "cho")
    before = formed(busy)
    while formed(busy) == before:
        work_round(busy, others)
    lease = busy.ask(ann, formed(busy) - 1).lease
    assert lease is not None
    assert lease.policy_version == formed(busy) - 1


def test_one_liar_does_not_move_the_time_that_a_version_needs(busy: Swarm) -> None:
    proven_swarm(busy, "ann", "bob", "cho", "dan", "eve")
    lags = {row["name"]: row["lag_s"] for row in busy.all("SELECT name, lag_s FROM workers")}
    assert all(isinstance(lag, float) and lag >= 0 for lag in lags.values())
    busy.write(lambda connection: connection.execute("UPDATE workers SET lag_s=1e9 WHERE name='eve'"))
    busy.clock.advance(10)
    assert busy.ask(busy.client("eve"), formed(busy) - 1).reason == "need_weights"


def test_expired_work_of_an_old_version_that_was_chosen_earns_nothing(tmp_path: Path) -> None:
    with running(tmp_path, small_config(run={"steps": 30})) as swarm:
        swarm.publish(0)
        ann, eve = swarm.join("ann", "eve")
        swarm.produce(ann)
        swarm.publish(1)
        chosen = swarm.ask(eve, 0).lease
        assert chosen is not None
        assert chosen.policy_version == 0
        swarm.write(lambda connection: connection.execute("UPDATE slots SET deferred=1 WHERE step=1"))
        swarm.produce(ann)
        swarm.publish(2)
        assert formed(swarm) == 2
        eve.submit(chosen.lease_id, b"old")
        swarm.accept()
        row = swarm.one("SELECT credit_held, accepted FROM workers WHERE key=?", keypair("eve").public)
        assert row == {"credit_held": 0, "accepted": 1}


def test_late_work_with_the_newest_version_is_paid(busy: Swarm) -> None:
    *honest, eve = proven_swarm(busy, "ann", "bob", "cho", "dan", "eve")
    lease = take(busy, eve)
    held = "SELECT credit_held + credit_released AS n FROM workers WHERE key=?"
    before = busy.one(held, keypair("eve").public)
    busy.write(lambda connection: connection.execute("UPDATE slots SET deferred=1 WHERE slot=?", (lease.slot,)))
    busy.write(lambda connection: connection.execute("UPDATE leases SET expires_at=expires_at + 900"))
    for _ in range(8):
        work_round(busy, honest)
    eve.submit(lease.lease_id, b"slow, not old")
    busy.accept()
    after = busy.one(held, keypair("eve").public)
    assert int(str(after["n"])) == int(str(before["n"])) + 20


def test_a_key_that_wants_to_choose_its_slots_soon_gets_none(busy: Swarm) -> None:
    honest = proven_swarm(busy, "ann", "bob", "cho", "dan")
    (eve,) = busy.join("eve")
    looked = kept = 0
    for _ in range(60):
        lease = ask(busy, eve).lease
        if lease is not None:
            looked += 1
            if int(lease.slot_seed[:2], 16) % 8 == 0:
                eve.submit(lease.lease_id, b"liked")
                busy.accept()
                kept += 1
            else:
                eve.give_back(lease.lease_id)
        work_round(busy, honest)
    assert looked - kept <= 2 * kept + 8
