import os
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.swarm import TEST_DATABASE, Bridge, Swarm, registration, running, small_config
from protocol.samples import keypair
from shoal.coordinator import assignments
from shoal.coordinator.database import Connection
from shoal.errors import RefusedError, UnavailableError
from shoal.files import digest_bytes
from shoal.protocol import api
from shoal.protocol.client import SUBMISSION_SIGNATURE_HEADER, CoordinatorClient
from shoal.protocol.signing import BODY_HEADER, stamp_request, submission_message
from shoal.protocol.verdicts import Reason

HEARTBEAT = api.HeartbeatBody(activity="generating", tokens_generated=5, bytes_received=7)


def lossy(swarm: Swarm, name: str) -> tuple[CoordinatorClient, Bridge]:
    client = swarm.client(name)
    bridge = client._http._transport
    assert isinstance(bridge, Bridge)
    return client, bridge


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(RefusedError) as caught:
        call()
    return caught.value.code


# Registration and presence


def test_registering_twice_updates_what_is_said_and_keeps_what_is_earned(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.produce(ann, useful=0)
    view = ann.register(registration("ann on a new laptop", tokens_per_s=7.0))
    assert (view.name, view.tokens_per_s, view.submissions_accepted) == ("ann on a new laptop", 7.0, 1)
    assert [entry["kind"] for entry in swarm.all("SELECT kind FROM ledger")].count("registered") == 1


def test_a_heartbeat_brings_back_state_credit_and_relays(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    swarm.client("relay").announce_relay(api.RelayBody(url="http://relay:7400"))
    answer = ann.heartbeat(HEARTBEAT)
    assert (answer.worker.state, answer.worker.activity, answer.run_state) == ("registered", "generating", "running")
    assert answer.relay_urls == ["http://relay:7400"]


def test_a_heartbeat_writes_nothing(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    before = swarm.all("SELECT * FROM nonces")
    ann.heartbeat(HEARTBEAT)
    assert swarm.all("SELECT * FROM nonces") == before


def test_a_replayed_heartbeat_cannot_keep_a_dead_worker_alive(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    body = HEARTBEAT.model_dump_json().encode()
    headers = ann._headers("POST", "/v1/heartbeat", body, None)
    assert swarm.http.post("/v1/heartbeat", content=body, headers=headers).status_code == 200
    swarm.clock.advance(31)
    answer = swarm.http.post("/v1/heartbeat", content=body, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (401, "clock")


def test_a_silent_worker_is_given_up_and_welcomed_back_with_what_it_had(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.produce(ann, useful=0)
    swarm.produce(ann, useful=0)
    assert swarm.state_of("ann") == "active"
    swarm.clock.advance(31)
    assert swarm.sweep()
    assert swarm.state_of("ann") == "gone"
    assert not swarm.sweep()
    assert ann.heartbeat(HEARTBEAT).worker.state == "active"
    swarm.clock.advance(31)
    swarm.sweep()
    assert swarm.ask(ann, 0).lease is not None
    assert swarm.state_of("ann") == "active"


def test_a_restart_forgets_nobody(tmp_path: Path) -> None:
    with running(tmp_path, small_config()) as swarm:
        swarm.join("ann")
        clock = swarm.clock
    clock.advance(3600)
    with running(tmp_path, small_config(), clock) as swarm:
        swarm.sweep()
        assert swarm.state_of("ann") == "registered"
        clock.advance(31)
        swarm.sweep()
        assert swarm.state_of("ann") == "gone"


# Relays


def test_the_list_of_relays_is_bounded_and_forgets_the_silent(swarm: Swarm) -> None:
    for number in range(64):
        relay = api.RelayBody(url=f"http://relay-{number}")
        swarm.context.note_relay(keypair(f"relay-{number}").public, relay, (swarm.clock(), "nonce"))
    late = swarm.client("relay-late")
    assert refusal(lambda: late.announce_relay(api.RelayBody(url="http://late"))) == "too_many_relays"
    swarm.client("relay-0").announce_relay(api.RelayBody(url="http://moved", newest_version=3))
    swarm.clock.advance(601)
    assert [view.url for view in late.announce_relay(api.RelayBody(url="http://late")).relays] == ["http://late"]


def test_silent_relays_are_not_recommended(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    swarm.client("relay").announce_relay(api.RelayBody(url="http://relay"))
    swarm.clock.advance(31)
    assert ann.heartbeat(HEARTBEAT).relay_urls == []
    assert [view.last_seen_s for view in ann.relays().relays] == [31.0]


# Leases


def test_nobody_works_before_the_first_version(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    assert swarm.ask(ann, 0).reason == "waiting_for_trainer"


def test_a_worker_without_weights_is_told_which_to_fetch(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    answer = swarm.ask(ann)
    assert (answer.reason, answer.wanted_version, answer.wanted_manifest) == ("need_weights", 0, f"{0:064x}")


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


def test_no_more_slots_are_opened_than_the_step_needs(swarm: Swarm) -> None:
    swarm.publish(0)
    workers = swarm.join("ann", "bob", "cho", "dan")
    leases = [lease for worker in workers for _ in range(2) if (lease := swarm.ask(worker, 0).lease)]
    assert [lease.slot for lease in leases] == [0, 1, 2]


def test_a_repeated_request_gets_the_same_lease(swarm: Swarm) -> None:
    swarm.publish(0)
    swarm.join("ann")
    ann, bridge = lossy(swarm, "ann")
    bridge.lose_answers = 2
    answer = swarm.ask(ann, 0, request_id="request-once")
    again = swarm.ask(ann, 0, request_id="request-once")
    assert answer.lease == again.lease
    assert again.wanted_manifest == f"{0:064x}"
    assert len(swarm.all("SELECT * FROM leases")) == 1


def test_the_same_request_id_of_another_key_is_another_request(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    first = swarm.ask(ann, 0, request_id="request-same").lease
    second = swarm.ask(bob, 0, request_id="request-same").lease
    assert first is not None
    assert second is not None
    assert first.lease_id != second.lease_id


def test_a_slow_worker_gets_more_time_but_not_for_ever(swarm: Swarm) -> None:
    swarm.publish(0)
    swift, slow = swarm.join("swift", "slow")
    slow.register(registration("slow", tokens_per_s=3.0))
    assert swarm.lease(swift).expires_at - swarm.clock() == 10
    assert swarm.lease(slow).expires_at - swarm.clock() == 60


def test_a_machine_that_could_never_finish_a_slot_is_told_so(swarm: Swarm) -> None:
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


def test_nobody_shops_for_easy_slots_while_others_work(swarm: Swarm) -> None:
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
        swarm.context.seen(f"worker-{number}")
    assert swarm.ask(ann, 0).retry_after_s == pytest.approx(10, abs=0.1)


# Shares


def test_one_key_fills_its_share_and_no_more_while_others_work(tmp_path: Path) -> None:
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


def test_a_key_that_only_shows_life_cannot_stall_the_swarm(tmp_path: Path) -> None:
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
    def others_work(name: str, *, proven: bool = False) -> bool:
        key = keypair(name).public
        return swarm.read(lambda connection: assignments.others_work(connection, swarm.context, key, proven=proven))

    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    assert not others_work("ann")
    swarm.write(lambda connection: connection.execute("UPDATE workers SET state='active' WHERE name='ann'"))
    swarm.lease(ann)
    assert not others_work("ann", proven=True)
    assert others_work("bob", proven=True)
    swarm.lease(bob)
    assert others_work("ann")
    assert not others_work("ann", proven=True)
    swarm.clock.advance(31)
    assert not others_work("ann")
    bob.heartbeat(HEARTBEAT)
    assert others_work("ann")
    swarm.clock.advance(30)
    bob.heartbeat(HEARTBEAT)
    assert not others_work("ann")


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
                f"INSERT INTO leases VALUES ({','.join('?' * len(copy))})", tuple(copy.values())
            )
        )
    key = keypair("ann").public
    assert swarm.read(lambda connection: assignments.others_work(connection, swarm.context, key, proven=False))


# Uploads


def test_an_upload_is_stored_under_a_name_of_the_server(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)
    answer = ann.submit(lease.lease_id, b"rollouts")
    assert answer.state == "pending"
    row = swarm.one("SELECT * FROM submissions")
    assert (row["submission_id"], row["digest"], row["size_bytes"]) == (
        answer.submission_id,
        digest_bytes(b"rollouts"),
        8,
    )
    assert swarm.context.file_of(answer.submission_id).read_bytes() == b"rollouts"


def test_an_upload_whose_answer_was_lost_is_kept_once(swarm: Swarm) -> None:
    swarm.publish(0)
    swarm.join("ann")
    ann, bridge = lossy(swarm, "ann")
    lease = swarm.lease(ann)
    bridge.lose_answers = 2
    answer = ann.submit(lease.lease_id, b"rollouts")
    assert [path.stem for path in swarm.context.submissions.iterdir()] == [answer.submission_id]
    assert len(swarm.all("SELECT * FROM submissions")) == 1


def test_the_same_upload_is_recognised_even_after_its_verdict(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)
    first = ann.submit(lease.lease_id, b"rollouts")
    swarm.accept()
    swarm.clock.advance(100)
    again = ann.submit(lease.lease_id, b"rollouts")
    assert (again.submission_id, again.state) == (first.submission_id, "judged")
    assert len(list(swarm.context.submissions.iterdir())) == 1


def test_a_lease_is_answered_by_one_file(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease, _ = swarm.work(ann)
    assert refusal(lambda: ann.submit(lease.lease_id, b"on second thought")) == "already_submitted"
    assert len(list(swarm.context.submissions.iterdir())) == 1


def test_an_upload_after_the_deadline_is_refused(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)
    swarm.clock.advance(10.1)
    assert refusal(lambda: ann.submit(lease.lease_id, b"late")) == "lease_expired"
    assert list(swarm.context.submissions.iterdir()) == []


def test_an_upload_that_is_too_large_is_refused_and_removed(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)
    assert refusal(lambda: ann.submit(lease.lease_id, b"x" * 10_001)) == "too_large"
    assert list(swarm.context.submissions.iterdir()) == []
    ann.submit(lease.lease_id, b"x" * 10_000)


def upload(swarm: Swarm, lease_id: str, data: bytes, *, signed: bytes, **headers: str) -> tuple[int, str]:
    """Sends ann's upload as the client would send `signed`, with some headers replaced."""
    ann, target, digest = keypair("ann"), f"/v1/submissions/{lease_id}", digest_bytes(signed)
    audience = swarm.context.descriptor.coordinator_key
    stamp = stamp_request(ann, "run-1", audience, "PUT", target, "", digest, swarm.clock())
    evidence = ann.sign(submission_message("run-1", lease_id, digest))
    own = {BODY_HEADER: digest, SUBMISSION_SIGNATURE_HEADER: evidence}
    answer = swarm.http.put(target, content=data, headers=stamp.headers() | own | headers)
    return answer.status_code, answer.json().get("code", "")


def test_bytes_other_than_the_signed_ones_are_refused_and_removed(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease_id = swarm.lease(ann).lease_id
    assert upload(swarm, lease_id, b"delivered", signed=b"promised") == (400, "digest")
    assert list(swarm.context.submissions.iterdir()) == []
    assert swarm.one("SELECT state FROM leases") == {"state": "leased"}
    assert upload(swarm, lease_id, b"promised", signed=b"promised") == (200, "")


@pytest.mark.parametrize("header", [SUBMISSION_SIGNATURE_HEADER, BODY_HEADER, "x-shoal-signature"])
@pytest.mark.parametrize("value", ["", "00" * 64])
def test_an_upload_without_evidence_is_refused(swarm: Swarm, header: str, value: str) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease_id = swarm.lease(ann).lease_id
    assert upload(swarm, lease_id, b"data", signed=b"data", **{header: value}) == (401, "bad_signature")
    assert list(swarm.context.submissions.iterdir()) == []


def test_strangers_cannot_fill_the_disk(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.coordinator.worker_routes.stream_to_disk", None)
    answer = swarm.http.put("/v1/submissions/anything", content=b"x" * 5000)
    assert (answer.status_code, answer.json()["code"]) == (401, "bad_signature")
    assert refusal(lambda: swarm.client("stranger").submit("0" * 32, b"x" * 5000)) == "unknown_worker"


def test_when_uploads_cannot_be_stored_nothing_is_lost(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)
    rollouts = swarm.context.submissions
    swarm.context.submissions = rollouts / "unmounted"
    with pytest.raises(UnavailableError, match=r"503: The upload cannot be stored: No such file"):
        ann.submit(lease.lease_id, b"rollouts")
    swarm.context.submissions = rollouts
    assert swarm.one("SELECT state FROM leases") == {"state": "leased"}
    assert ann.submit(lease.lease_id, b"rollouts").state == "pending"


def fill(worker: CoordinatorClient) -> None:
    for _ in range(200):
        worker.register(registration("a" * 200))


@pytest.mark.skipif(bool(os.environ.get(TEST_DATABASE)), reason="only SQLite can be told how much disk there is")
def test_when_the_store_is_full_intake_stops_with_a_clear_error(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)

    def squeeze(connection: Connection, pages: int) -> None:
        connection.execute(f"PRAGMA max_page_count={pages}").fetchone()

    used = swarm.write(lambda connection: int(connection.execute("PRAGMA page_count").fetchone()["page_count"]))
    swarm.write(lambda connection: squeeze(connection, used))
    with pytest.raises(UnavailableError, match="disk is full"):
        fill(ann)
    swarm.write(lambda connection: squeeze(connection, 1_000_000))
    assert ann.submit(lease.lease_id, b"rollouts").state == "pending"


def test_audits_are_drawn_when_the_file_arrives(tmp_path: Path) -> None:
    with running(tmp_path, small_config(trust={"audit_floor": 0.0, "probation_audits": 1})) as swarm:
        swarm.publish(0)
        (ann,) = swarm.join("ann")
        swarm.work(ann)
        assert swarm.claim().audit
        swarm.write(lambda connection: connection.execute("UPDATE workers SET state='active', clean_audits=1000000"))
        swarm.work(ann)
        assert not swarm.claim().audit


def test_rejected_work_opens_its_slot_to_a_different_key(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    lease, _ = swarm.work(ann)
    swarm.reject(Reason.LOGPROBS)
    assert swarm.lease(ann).slot == 1
    assert swarm.lease(bob).slot == lease.slot
