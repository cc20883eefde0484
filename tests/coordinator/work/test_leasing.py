"""Which slot and which version a worker gets, and what becomes of dropped slots."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from coordinator.work.test_slots import assert_tallies_are_true
from shoal.errors import RefusedError
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.verdicts import Reason
from support.samples import keypair
from support.swarm import HEARTBEAT, Swarm, lossy, refusal, registration, running, small_config


def test_nobody_works_before_the_first_version(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    assert swarm.ask(ann, 0).reason == "waiting_for_trainer"


def test_a_worker_without_weights_learns_which_to_fetch(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    answer = swarm.ask(ann)
    assert (answer.reason, answer.wanted_version) == ("need_weights", 0)


def test_the_lease_names_the_newest_version_that_the_worker_holds(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    swarm.produce(ann)
    swarm.publish(1)
    old, new = swarm.ask(ann, 0), swarm.ask(bob, 0, 1, 7)
    assert old.lease is not None
    assert new.lease is not None
    assert (old.lease.policy_version, old.wanted_version) == (0, 1)
    assert (new.lease.policy_version, new.lease.manifest_digest) == (1, f"{1:064x}")


def test_the_swarm_runs_ahead_of_the_trainer_by_the_asynchrony_and_no_further(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.produce(ann)
    lease = swarm.produce(ann)
    assert (lease.step, lease.policy_version) == (1, 0)
    assert swarm.ask(ann, 0).reason == "waiting_for_trainer"


def test_a_synchronous_run_waits_for_each_version(tmp_path: Path) -> None:
    with running(tmp_path, small_config(training={"async_level": 0})) as swarm:
        swarm.publish(0)
        (ann,) = swarm.join("ann")
        swarm.produce(ann)
        assert swarm.ask(ann, 0).reason == "waiting_for_trainer"
        swarm.publish(1)
        assert swarm.ask(ann, 0).reason == "need_weights"


def test_when_all_batches_are_formed_there_is_no_work(tmp_path: Path) -> None:
    with running(tmp_path, small_config(run={"steps": 1})) as swarm:
        swarm.publish(0)
        (ann,) = swarm.join("ann")
        swarm.produce(ann)
        assert swarm.ask(ann, 0).reason == "no_work"
        swarm.publish(1)
        assert swarm.ask(ann, 0).reason == "finished"


def test_a_key_holds_two_leases_at_most(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    assert [swarm.lease(ann).slot, swarm.lease(ann).slot] == [0, 1]
    assert swarm.ask(ann, 0).reason == "no_work"


def test_no_more_slots_are_opened_than_this_step_and_the_next_one_need(swarm: Swarm) -> None:
    """With a useful share of one half and a surplus of a quarter this one gets six groups, which leave one for the next."""
    swarm.publish(0)
    workers = swarm.join("ann", "bob", "cho", "dan")
    leases = [lease for worker in workers for _ in range(2) if (lease := swarm.ask(worker, 0).lease)]
    assert [(lease.step, lease.slot) for lease in leases] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_a_repeated_request_gets_the_same_lease(swarm: Swarm) -> None:
    swarm.publish(0)
    swarm.join("ann")
    ann, bridge = lossy(swarm, "ann")
    bridge.lose_answers = 2
    answer = swarm.ask(ann, 0, request_id="request-once")
    again = swarm.ask(ann, 0, request_id="request-once")
    assert answer.lease == again.lease
    assert again.wanted_version == 0
    assert len(swarm.all("SELECT * FROM leases")) == 1


def ask_for(worker: CoordinatorClient, most: int, request_id: str) -> api.LeaseAnswer:
    return worker.lease(api.LeaseBody(request_id=request_id, held_versions=[0], most=most))


def test_one_request_brings_as_many_slots_as_the_worker_can_take_and_may_have(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    one = ask_for(ann, 1, "request-one")
    assert [lease.slot for lease in one.granted] == [0]
    others = ask_for(ann, 8, "request-many")
    assert [lease.slot for lease in others.granted] == [1], "a key may hold two"
    assert (others.reason, others.wanted_version) == ("granted", 0)
    none = ask_for(ann, 8, "request-more")
    assert (none.granted, none.reason) == ([], "no_work")
    two = ask_for(bob, 2, "request-two").granted
    assert [(lease.step, lease.slot) for lease in two] == [(0, 2), (1, 0)]
    assert len({lease.lease_id for lease in [*one.granted, *others.granted, *two]}) == 4
    assert_tallies_are_true(swarm)


def test_a_repeated_request_for_several_slots_gets_the_same_ones(swarm: Swarm) -> None:
    swarm.publish(0)
    swarm.join("ann")
    ann, bridge = lossy(swarm, "ann")
    bridge.lose_answers = 2
    answer = ask_for(ann, 2, "request-once")
    assert len(answer.granted) == 2
    assert ask_for(ann, 2, "request-once").granted == answer.granted
    assert ask_for(ann, 1, "request-once").granted == answer.granted[:1]
    assert len(swarm.all("SELECT * FROM leases")) == 2


def test_no_other_request_gets_the_slots_of_one_by_its_name(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    mine = ask_for(ann, 2, "request-same").granted
    assert not {lease.lease_id for lease in mine} & {
        lease.lease_id for lease in ask_for(bob, 2, "request-same").granted
    }
    with pytest.raises(ValidationError):
        api.LeaseBody(request_id="request-same/1", held_versions=[0])
    with pytest.raises(ValidationError):
        api.LeaseBody(request_id="request-same", held_versions=[0], most=api.MOST_LEASES + 1)


def ahead_of(swarm: Swarm) -> tuple[CoordinatorClient, CoordinatorClient, api.Lease]:
    """Two keys have taken this step's slots; the second also has the first slot of the next one."""
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    leases = [*ask_for(ann, 2, "request-one").granted, *ask_for(bob, 2, "request-two").granted]
    assert [(lease.step, lease.slot) for lease in leases] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    return ann, bob, leases[-1]


def test_a_slot_of_the_next_step_enters_the_batch_of_that_step(swarm: Swarm) -> None:
    ann, bob, lease = ahead_of(swarm)
    bob.submit(lease.lease_id, b"ahead")
    swarm.accept()
    assert not swarm.all("SELECT * FROM batches"), "its groups are not this step's"
    for row in swarm.all("SELECT lease_id FROM leases WHERE step=0 AND slot < 2 ORDER BY slot"):
        ann.submit(str(row["lease_id"]), str(row["lease_id"]).encode())
        swarm.accept()
    batches = swarm.all(
        "SELECT batch_step, step, policy_version FROM groups WHERE batch_step IS NOT NULL ORDER BY batch_step"
    )
    assert {(row["batch_step"], row["step"]) for row in batches[:2]} == {(0, 0)}
    assert swarm.one("SELECT ages FROM batches WHERE step=0")["ages"] == '{"0": 2}'
    assert_tallies_are_true(swarm)


def test_a_slot_of_the_next_step_that_was_dropped_is_filled_by_another_key(swarm: Swarm) -> None:
    _, bob, lease = ahead_of(swarm)
    (cho,) = swarm.join("cho")
    bob.give_back(lease.lease_id)
    again = swarm.lease(cho, 0)
    assert (again.step, again.slot, again.slot_seed) == (1, 0, lease.slot_seed)
    assert again.lease_id != lease.lease_id
    cho.give_back(again.lease_id)
    assert swarm.lease(bob, 0).slot == 1, "a key gets no slot a second time"
    assert_tallies_are_true(swarm)


def test_a_banned_key_leaves_no_filled_slot_in_the_next_step(swarm: Swarm) -> None:
    _, bob, lease = ahead_of(swarm)
    bob.submit(lease.lease_id, b"ahead")
    swarm.accept()
    swarm.client("run").ban(api.BanBody(worker=keypair("bob").public, reason="copied answers"))
    assert swarm.one("SELECT state FROM slots WHERE step=1 AND slot=0")["state"] == "void"
    assert {row["state"] for row in swarm.all("SELECT state FROM groups WHERE step=1")} == {"withdrawn"}
    assert_tallies_are_true(swarm)


def test_nobody_works_ahead_of_the_last_step_or_in_a_synchronous_run(tmp_path: Path) -> None:
    for name, config in (
        ("last", small_config(run={"steps": 1})),
        ("synchronous", small_config(training={"async_level": 0, "groups_per_step": 2, "oversampling": 4.0})),
    ):
        with running(tmp_path / name, config) as swarm:
            swarm.publish(0)
            ann, bob = swarm.join("ann", "bob")
            leases = [*ask_for(ann, 8, "request-one").granted, *ask_for(bob, 8, "request-two").granted]
            assert [(lease.step, lease.slot) for lease in leases] == [(0, 0), (0, 1), (0, 2)]


def test_the_same_request_id_of_another_key_is_another_request(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    first = swarm.ask(ann, 0, request_id="request-same").lease
    second = swarm.ask(bob, 0, request_id="request-same").lease
    assert first is not None
    assert second is not None
    assert first.lease_id != second.lease_id


@pytest.mark.parametrize("tokens_per_s", [3.0, 100.0, 9e8])
def test_a_claim_of_speed_changes_no_deadline(swarm: Swarm, tokens_per_s: float) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    ann.register(registration("ann", tokens_per_s=tokens_per_s))
    assert swarm.lease(ann).expires_at - swarm.clock() == 15


def test_a_machine_that_could_never_finish_a_slot_is_refused(swarm: Swarm) -> None:
    slow = swarm.client("slow")
    with pytest.raises(RefusedError, match=r"a slot takes up to 80 s; leases of this run last 60 s") as refused:
        slow.register(registration("slow", tokens_per_s=2.0))
    assert (refused.value.code, refused.value.status) == ("too_slow", 422)
    assert swarm.all("SELECT 1 FROM workers") == []


def test_a_key_that_registered_is_on_probation_with_its_first_request_for_work(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    assert swarm.state_of("ann") == "registered"
    ann.heartbeat(api.HeartbeatBody(activity="measuring"))
    assert swarm.state_of("ann") == "registered"
    swarm.ask(ann, 0)
    assert swarm.state_of("ann") == "probation"


@pytest.mark.parametrize("how", ["given back", "ran out", "disappeared"])
def test_a_dropped_slot_goes_unchanged_to_a_different_key(swarm: Swarm, how: str) -> None:
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    ann.register(registration("ann", tokens_per_s=3.0))
    dropped = swarm.lease(ann)
    if how == "given back":
        ann.give_back(dropped.lease_id)
    elif how == "ran out":
        swarm.clock.advance(61)
    else:
        swarm.clock.advance(31)
        bob.heartbeat(HEARTBEAT)
        swarm.sweep()
        assert swarm.state_of("ann") == "gone"
    if how != "disappeared":
        assert swarm.lease(ann).slot == 1
    taken = swarm.lease(bob)
    assert (taken.slot, taken.slot_seed) == (dropped.slot, dropped.slot_seed)
    assert taken.lease_id != dropped.lease_id
    assert refusal(lambda: ann.submit(dropped.lease_id, b"too late")) == "lease_expired"


def test_giving_back_twice_is_giving_back_once(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)
    ann.give_back(lease.lease_id)
    ann.give_back(lease.lease_id)
    assert swarm.one("SELECT state FROM leases") == {"state": "returned"}


def test_nobody_gives_back_what_another_holds(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, eve = swarm.join("ann", "eve")
    lease = swarm.lease(ann)
    assert refusal(lambda: eve.give_back(lease.lease_id)) == "unknown_lease"
    assert refusal(lambda: eve.submit(lease.lease_id, b"mine now")) == "unknown_lease"
    assert swarm.one("SELECT state FROM leases") == {"state": "leased"}


def test_giving_back_after_submitting_changes_nothing(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease, _ = swarm.work(ann)
    ann.give_back(lease.lease_id)
    assert swarm.one("SELECT state FROM slots") == {"state": "submitted"}


def test_no_key_selects_easy_slots_beside_other_workers(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, eve = swarm.join("ann", "eve")
    swarm.lease(ann)
    for _ in range(4):
        eve.give_back(swarm.lease(eve).lease_id)
    assert swarm.ask(eve, 0).reason == "no_work"
    assert swarm.lease(ann).slot == 1


def test_a_lone_worker_may_go_on_after_bad_luck(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    for _ in range(6):
        ann.give_back(swarm.lease(ann).lease_id)
    assert swarm.ask(ann, 0).lease is not None


def test_idle_workers_of_a_large_swarm_ask_less_often(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    assert swarm.ask(ann, 0).retry_after_s == 0.25
    for number in range(4000):
        swarm.run.presence.seen(f"worker-{number}")
    assert swarm.ask(ann, 0).retry_after_s == 0.25, "a key that does not ask slows nobody down"
    for number in range(4000):
        swarm.run.presence.note_asking(f"worker-{number}", has_delivered=False)
    assert swarm.ask(ann, 0).retry_after_s == pytest.approx(20, abs=0.1)
    swarm.clock.advance(21)
    assert swarm.ask(ann, 0).retry_after_s == 0.25


def test_a_crowd_that_never_delivered_does_not_slow_down_keys_that_did(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.produce(ann)
    swarm.produce(ann)
    for number in range(4000):
        swarm.run.presence.note_asking(f"worker-{number}", has_delivered=False)
    assert swarm.ask(ann, 0).retry_after_s == 0.25


def test_rejected_work_opens_its_slot_to_a_different_key(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    lease, _ = swarm.work(ann)
    swarm.reject(Reason.LOGPROBS)
    assert swarm.lease(ann).slot == 1
    assert swarm.lease(bob).slot == lease.slot


def test_a_lease_that_expires_in_the_request_of_its_own_key_counts_against_it(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.produce(ann)
    swarm.lease(ann, 0)
    swarm.publish(1)
    swarm.clock.advance(61)
    assert swarm.lease(ann, 0, 1).policy_version == 1  # for the first time, which is noted in the same record
    assert swarm.one("SELECT failures FROM workers")["failures"] == 1
