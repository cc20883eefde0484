"""No key holds up a step: stallers, keys that return or spoil their slots late, and keys that claim a speed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.protocol.verdicts import Reason
from support.backups import CONFIG, WORK_S, ask, formed, proven_swarm, take, work_round
from support.samples import keypair
from support.swarm import HEARTBEAT, Swarm, registration, running


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


def test_records_count_after_a_training_step_that_lasts_longer_than_any_lease(busy: Swarm) -> None:
    honest = proven_swarm(busy, "ann", "bob", "cho", "dan")
    for _ in range(20):
        busy.clock.advance(100)
        for worker in honest:
            worker.heartbeat(HEARTBEAT)
    (new,) = busy.join("new")
    take(busy, new)
    assert deferred_slots(busy, "new") == [1]


def test_a_key_that_stops_asking_does_not_keep_slower_ones_off_the_critical_path_for_long(busy: Swarm) -> None:
    """A fast key carries the run and goes silent but for heartbeats; the others need longer than it ever did."""
    (fast,) = proven_swarm(busy, "fast")
    slow = busy.join("ann", "bob")
    for _ in range(3):
        fast.heartbeat(HEARTBEAT)
        work_round(busy, slow, 4 * WORK_S)
    assert [deferred_slots(busy, name) for name in ("ann", "bob") if take(busy, busy.client(name))] == [[0], [0]]


def test_a_key_that_alternates_between_work_and_stalls_is_not_counted_on(busy: Swarm) -> None:
    honest = proven_swarm(busy, "ann", "bob", "cho", "dan")
    (eve,) = busy.join("eve")
    for _ in range(4):
        work_round(busy, [eve, *honest])
        ask(busy, eve)
        for _ in range(5):
            work_round(busy, honest)
    ask(busy, eve)
    assert 0 not in deferred_slots(busy, "eve")


@pytest.mark.parametrize("speed", [1e-3, 9e8])
def test_a_claimed_speed_changes_no_deadline(busy: Swarm, speed: float) -> None:
    proven_swarm(busy, "ann", "bob", "cho", "dan")
    usual, boaster = busy.join("usual", "boaster")
    claim = registration("boaster", tokens_per_s=max(speed, busy.run.slot_tokens / 60 + 1))
    boaster.register(claim)
    assert take(busy, boaster).expires_at == take(busy, usual).expires_at
