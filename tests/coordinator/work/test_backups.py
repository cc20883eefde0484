"""A slot whose key is late goes to a second key; the first accepted file counts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.work.test_slots import assert_tallies_are_true
from shoal.protocol import api
from shoal.protocol.verdicts import Reason
from support.backups import (
    CONFIG,
    NAMES,
    WORK_S,
    ask,
    backup_of,
    drain,
    formed,
    proven_swarm,
    take,
    two_files,
    work_round,
)
from support.samples import keypair
from support.swarm import Swarm, refusal, running


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Swarm]:
    with running(tmp_path, CONFIG) as swarm:
        yield swarm
        assert_tallies_are_true(swarm)


def leases_of(swarm: Swarm, lease: api.Lease) -> list[dict[str, object]]:
    sql = "SELECT * FROM leases WHERE step=? AND slot=? ORDER BY issued_at"
    return swarm.all(sql, lease.step, lease.slot)


def slot_of(swarm: Swarm, lease: api.Lease) -> dict[str, object]:
    return swarm.one("SELECT * FROM slots WHERE step=? AND slot=?", lease.step, lease.slot)


def test_a_late_slot_goes_to_a_second_key_with_the_same_seed_and_version(busy: Swarm) -> None:
    *honest, eve = proven_swarm(busy, *NAMES)
    lease = take(busy, eve)
    _, again = backup_of(busy, lease, honest)
    assert (again.slot_seed, again.policy_version) == (lease.slot_seed, lease.policy_version)
    assert again.lease_id != lease.lease_id
    assert [row["state"] for row in leases_of(busy, lease)] == ["leased", "leased"]
    drain(busy)


def test_a_staller_that_earned_its_place_delays_a_step_by_one_backup(busy: Swarm) -> None:
    *honest, eve = proven_swarm(busy, *NAMES)
    before, lease = formed(busy), take(busy, eve)
    while (other := ask(busy, honest[0]).lease) is not None and other.step == lease.step:
        honest[0].submit(other.lease_id, other.lease_id.encode())
    drain(busy)
    worker, again = backup_of(busy, lease, honest)
    drain(busy)
    assert formed(busy) == before, "the batch waits for the slot"
    worker.submit(again.lease_id, b"in time")
    busy.accept()
    assert formed(busy) == before + 1
    assert eve.heartbeat(api.HeartbeatBody(activity="stalling")).worker.state == "active"


def test_the_first_accepted_file_counts_and_the_other_shares_its_credit(busy: Swarm) -> None:
    *honest, eve = proven_swarm(busy, *NAMES)
    lease = take(busy, eve)
    worker, again = backup_of(busy, lease, honest)
    drain(busy)
    eve.submit(lease.lease_id, b"late, but first")
    busy.accept()
    credit = "SELECT SUM(credit_held + credit_released) AS n FROM workers"
    paid = busy.one(credit)
    worker.submit(again.lease_id, b"second")
    audits = "SELECT clean_audits, accepted FROM workers WHERE key=?"
    assert worker.keypair is not None
    before = busy.one(audits, worker.keypair.public)
    busy.accept()
    assert busy.one(credit) == paid, "a slot is paid once"
    half = busy.all("SELECT body FROM ledger WHERE kind='credit' ORDER BY seq DESC LIMIT 2")
    assert '"held":-10' in str(half[1]["body"]).replace(" ", "")
    after = busy.one(audits, worker.keypair.public)
    assert after == before | {"accepted": int(str(before["accepted"])) + 1}, "only the file that counts earns trust"
    assert slot_of(busy, lease)["lease_id"] == lease.lease_id
    assert len(busy.all("SELECT 1 FROM groups WHERE step=? AND slot=?", lease.step, lease.slot)) == 2


def test_a_late_second_file_earns_nothing(busy: Swarm) -> None:
    *honest, eve = proven_swarm(busy, *NAMES)
    lease = take(busy, eve)
    worker, again = backup_of(busy, lease, honest)
    worker.submit(again.lease_id, b"first")
    drain(busy)
    credit = "SELECT credit_held + credit_released AS n FROM workers WHERE key=?"
    before = busy.one(credit, keypair("eve").public)
    eve.submit(lease.lease_id, b"second and late")
    drain(busy)
    assert busy.one(credit, keypair("eve").public) == before


@pytest.mark.parametrize("junk_first", [True, False])
def test_junk_never_ends_the_other_lease(busy: Swarm, junk_first: bool) -> None:
    *honest, eve = proven_swarm(busy, *NAMES)
    lease = take(busy, eve)
    worker, again = backup_of(busy, lease, honest)
    drain(busy)
    if junk_first:
        eve.submit(lease.lease_id, b"junk")
        busy.reject(Reason.LOGPROBS)
        assert slot_of(busy, lease)["state"] == "leased"
    else:
        eve.submit(lease.lease_id, b"junk")
        assert slot_of(busy, lease)["state"] == "submitted"
    worker.submit(again.lease_id, b"good")
    if not junk_first:
        busy.reject(Reason.LOGPROBS)
        assert slot_of(busy, lease)["state"] == "submitted"
    busy.accept()
    assert slot_of(busy, lease)["lease_id"] == again.lease_id
    assert slot_of(busy, lease)["state"] == "resolved"


def test_a_ban_of_the_first_key_leaves_the_slot_to_the_second(busy: Swarm) -> None:
    *honest, eve = proven_swarm(busy, *NAMES)
    lease = take(busy, eve)
    worker, again = backup_of(busy, lease, honest)
    drain(busy)
    eve.submit(lease.lease_id, b"forged")
    busy.reject(Reason.REWARD)
    assert busy.state_of("eve") == "banned"
    assert slot_of(busy, lease)["state"] == "leased"
    worker.submit(again.lease_id, b"good")
    busy.accept()
    assert slot_of(busy, lease)["state"] == "resolved"


def test_if_the_second_key_is_late_too_a_third_follows(busy: Swarm) -> None:
    *honest, eve = proven_swarm(busy, *NAMES)
    lease = take(busy, eve)
    second, _ = backup_of(busy, lease, honest)
    third, again = backup_of(busy, lease, [worker for worker in honest if worker is not second])
    assert third is not second
    drain(busy)
    third.submit(again.lease_id, b"good")
    drain(busy)
    assert slot_of(busy, lease)["state"] == "resolved"


def test_no_key_gets_a_slot_twice_and_none_of_another_class_gets_it(busy: Swarm) -> None:
    *honest, eve = proven_swarm(busy, *NAMES)
    lease = take(busy, eve)
    busy.clock.advance(1.5 * WORK_S + 2)
    busy.write(lambda connection: connection.execute("UPDATE workers SET numerics_class='other' WHERE name <> 'eve'"))
    for worker in [eve, *honest]:
        for _ in range(2):
            ask(busy, worker)
    assert len(leases_of(busy, lease)) == 1


def test_a_key_without_a_record_is_never_drawn(busy: Swarm) -> None:
    *_, eve = proven_swarm(busy, *NAMES)
    (new,) = busy.join("new")
    lease = take(busy, eve)
    busy.clock.advance(1.5 * WORK_S + 2)
    for _ in range(4):
        ask(busy, new)
    assert len(leases_of(busy, lease)) == 1


def test_in_a_new_swarm_keys_back_each_other_up(busy: Swarm) -> None:
    busy.publish(0)
    eve, ann, bob = busy.join("eve", "ann", "bob")
    lease = take(busy, eve)
    busy.clock.advance(60 / 4 / 2 + 1.1)
    again = [answer.lease for worker in (ann, bob) if (answer := ask(busy, worker)).lease is not None]
    assert lease.slot in [one.slot for one in again if one is not None]


@pytest.mark.parametrize(("changed", "flips_allowed"), [(1, 0), (2, 1), (4, 3)])
def test_files_of_other_tokens_with_the_same_rewards_are_audited_both(
    busy: Swarm, changed: int, flips_allowed: int
) -> None:
    lease, first, second = two_files(busy, changed, flips_allowed)
    queued = [busy.claim(), busy.claim()]
    assert {one.submission_id for one in queued} == {first, second}
    assert all(one.audit_groups == [0, 1] for one in queued)
    groups = "SELECT COUNT(*) AS n FROM groups WHERE step=? AND slot=?"
    for one in queued:
        if one.submission_id == first:
            busy.accept(one)
        else:
            busy.reject(Reason.SAMPLING, claim=one)
    assert busy.one(groups, lease.step, lease.slot) == {"n": 2}
    assert slot_of(busy, lease)["lease_id"] == lease.lease_id


@pytest.mark.parametrize(("changed", "flips_allowed"), [(0, 0), (1, 1), (2, 3)])
def test_files_that_differ_by_rounding_alone_cause_no_audit(busy: Swarm, changed: int, flips_allowed: int) -> None:
    two_files(busy, changed, flips_allowed)
    assert busy.all("SELECT 1 FROM submissions WHERE state <> 'decided'") == []


def test_files_that_agree_cause_no_audit(busy: Swarm) -> None:
    *honest, eve = proven_swarm(busy, *NAMES)
    lease = take(busy, eve)
    worker, again = backup_of(busy, lease, honest)
    drain(busy)
    eve.submit(lease.lease_id, b"first")
    worker.submit(again.lease_id, b"second")
    drain(busy)
    assert busy.all("SELECT 1 FROM submissions WHERE state <> 'decided'") == []


def test_a_lease_that_lost_can_still_be_given_back_or_expire(busy: Swarm) -> None:
    *honest, eve = proven_swarm(busy, *NAMES)
    lease = take(busy, eve)
    worker, again = backup_of(busy, lease, honest)
    worker.submit(again.lease_id, b"good")
    drain(busy)
    busy.clock.advance(100)
    busy.sweep()
    assert slot_of(busy, lease)["state"] == "resolved"
    assert refusal(lambda: eve.submit(lease.lease_id, b"too late")) == "lease_expired"
    work_round(busy, honest)
