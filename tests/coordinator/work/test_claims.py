"""Which validator gets which submission, and which waiting requests a change wakes."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.coordinator.work import submissions
from shoal.protocol import api
from support.backups import CONFIG, ask, proven_swarm, take
from support.samples import keypair
from support.swarm import Swarm, running, small_config, verdict_of

PATIENCE_S = 60


def test_submissions_are_claimed_in_the_order_of_their_arrival(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    arrived = []
    for worker in (ann, bob, ann):
        arrived.append(swarm.work(worker)[1])
        swarm.clock.advance(1)
    assert [swarm.claim().submission_id for _ in arrived] == arrived


def test_a_claim_names_everything_that_a_validator_needs(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease, submission_id = swarm.work(ann)
    claim = swarm.claim()
    assert (claim.submission_id, claim.worker_key, claim.lease) == (submission_id, keypair("ann").public, lease)
    assert claim.audit_groups == [0, 1]
    data = swarm.client("validator").submission_file(claim.submission_id, claim.digest)
    assert data == f"rollouts of {lease.lease_id}".encode()


def test_a_repeated_claim_gets_the_same_submission(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.work(ann)
    swarm.work(ann)
    assert swarm.claim("request-once") == swarm.claim("request-once")
    assert swarm.claim("request-other").submission_id != swarm.claim("request-once").submission_id


def test_without_submissions_there_is_nothing_to_claim(swarm: Swarm) -> None:
    answer = swarm.client("validator").claim(api.ClaimBody(request_id="request-0", wait_s=0))
    assert (answer.claim, answer.run_state) == (None, "running")


def test_a_waiting_validator_is_woken_by_a_submission(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    validator = swarm.client("validator")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(validator.claim, api.ClaimBody(request_id="request-0", wait_s=30))
        _, submission_id = swarm.work(ann)
        answer = waiting.result(PATIENCE_S)
    assert answer.claim is not None
    assert answer.claim.submission_id == submission_id


def test_a_waiting_trainer_is_woken_by_the_verdict_that_completes_its_batch(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(swarm.client("trainer").batch, 0, 30.0)
        swarm.produce(ann)
        answer = waiting.result(PATIENCE_S)
    assert answer.batch is not None


def test_a_waiting_validator_learns_that_the_run_is_finished(tmp_path: Path) -> None:
    with running(tmp_path, small_config(run={"steps": 1})) as swarm, ThreadPoolExecutor(1) as pool:
        swarm.publish(0)
        (ann,) = swarm.join("ann")
        swarm.produce(ann)
        waiting = pool.submit(swarm.client("validator").claim, api.ClaimBody(request_id="request-0", wait_s=30))
        swarm.publish(1)
        answer = waiting.result(PATIENCE_S)
        assert (answer.claim, answer.run_state) == (None, "finished")


def test_nobody_is_left_waiting_when_the_coordinator_stops(swarm: Swarm) -> None:
    swarm.publish(0)
    with ThreadPoolExecutor(2) as pool:
        validator = pool.submit(swarm.client("validator").claim, api.ClaimBody(request_id="request-0", wait_s=30))
        trainer = pool.submit(swarm.client("trainer").batch, 0, 30.0)
        assert swarm.http.portal is not None
        swarm.http.portal.call(swarm.app.service.stop_waiting)
        assert validator.result(PATIENCE_S).claim is None
        assert "useful groups" in trainer.result(PATIENCE_S).waiting_for


def test_a_trainer_that_waits_in_vain_learns_what_is_missing(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.produce(ann, useful=1)
    swarm.lease(ann)
    answer = swarm.client("trainer").batch(0, wait_s=0)
    assert answer.waiting_for == "1 of 2 useful groups of step 0 (2 on their way, 1 workers present)"


def test_the_claim_of_a_validator_that_died_passes_to_another(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.work(ann)
    lost = swarm.claim()
    swarm.clock.advance(20.1)
    found = swarm.claim()
    assert found.submission_id == lost.submission_id
    assert found.claim_id != lost.claim_id
    validator = swarm.client("validator")
    assert not validator.verdict(verdict_of(lost)).recorded
    assert validator.verdict(verdict_of(found)).recorded
    assert not validator.verdict(verdict_of(lost)).recorded
    assert len(swarm.all("SELECT * FROM groups")) == 2


def test_a_claim_leaves_time_to_load_a_version_of_many_gigabytes(swarm: Swarm) -> None:
    """Three validators that began with such a version lost their claims one after the other, and the file was quarantined."""
    swarm.publish(0, size_bytes=65 * 10**9)
    (ann,) = swarm.join("ann")
    swarm.work(ann)
    claim = swarm.claim()
    swarm.clock.advance(20 + 600)
    assert swarm.client("validator").claim(api.ClaimBody(request_id=swarm.new_id(), wait_s=0)).claim is None
    assert swarm.client("validator").verdict(verdict_of(claim)).recorded
    swarm.work(ann)
    lost = swarm.claim()
    swarm.clock.advance(20 + 651)
    assert swarm.claim().submission_id == lost.submission_id, "a validator that died does not hold it for ever"


def test_files_that_a_batch_waits_for_are_verified_before_those_of_new_keys(tmp_path: Path) -> None:
    with running(tmp_path, CONFIG) as swarm:
        ann, *_ = proven_swarm(swarm, "ann", "bob", "cho")
        strangers = swarm.join(*(f"new-{number}" for number in range(4)))
        for stranger in strangers:
            lease = ask(swarm, stranger).lease
            if lease is not None:
                stranger.submit(lease.lease_id, b"junk that takes long to verify")
        swarm.clock.advance(1)
        lease = take(swarm, ann)
        waited_for = ann.submit(lease.lease_id, b"good").submission_id
        assert swarm.claim().submission_id == waited_for
        assert swarm.claim().worker_key in {worker.keypair.public for worker in strangers if worker.keypair}


def claim_of(swarm: Swarm, **changes: object) -> api.ClaimAnswer:
    body = {"request_id": swarm.new_id(), "wait_s": 0, **changes}
    return swarm.client("validator").claim(api.ClaimBody.model_validate(body))


def test_a_validator_gets_only_files_of_versions_that_it_has(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease, submission_id = swarm.work(ann)
    lacking = claim_of(swarm, ready=[])
    assert lacking.claim is None
    assert [(one.version, one.manifest_digest) for one in lacking.missing] == [
        (lease.policy_version, lease.manifest_digest)
    ]
    assert claim_of(swarm, ready=[], fetching=[lease.manifest_digest]).missing == []
    having = claim_of(swarm, ready=["0" * 64, lease.manifest_digest])
    assert having.claim is not None
    assert having.claim.submission_id == submission_id


def test_a_validator_hears_once_of_the_newest_version_before_it_has_files(swarm: Swarm) -> None:
    assert claim_of(swarm, ready=[]).newest is None, "nothing is published"
    swarm.publish(0)
    newest = claim_of(swarm, ready=[]).newest
    assert newest is not None
    assert newest.version == 0
    assert claim_of(swarm, ready=[], newest=newest.manifest_digest).newest is None
    assert claim_of(swarm).newest is None, "one that keeps no versions hears of none"
    (ann,) = swarm.join("ann")
    swarm.work(ann)
    beside = claim_of(swarm, ready=[newest.manifest_digest])
    assert beside.claim is not None
    assert beside.newest == newest


def test_a_validator_may_claim_several_files_of_one_version(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    arrived = []
    for _ in range(3):
        arrived.append(swarm.work(ann)[1])
        swarm.clock.advance(1)
    body = {"request_id": "request-several", "most": 2}
    answer = claim_of(swarm, **body)
    assert answer.claim is not None
    assert [one.submission_id for one in (answer.claim, *answer.beside)] == arrived[:2]
    assert claim_of(swarm, **body) == answer, "a repeated request gets the same files"
    last = claim_of(swarm, most=16)
    assert last.claim is not None
    assert (last.claim.submission_id, last.beside) == (arrived[2], [])


def test_large_files_are_not_claimed_together_however_many_are_asked_for(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small files followed by large ones must not fill a validator's memory."""
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    for _ in range(3):
        lease, _ = swarm.work(ann)
        swarm.clock.advance(1)
    monkeypatch.setattr(submissions, "MOST_BYTES_TOGETHER", 2 * len(f"rollouts of {lease.lease_id}"))
    assert len(claim_of(swarm, most=4).beside) == 1
    monkeypatch.setattr(submissions, "MOST_BYTES_TOGETHER", 0)
    alone = claim_of(swarm, most=4)
    assert alone.claim is not None, "one file is always claimed, whatever its size"
    assert alone.beside == []


def test_files_of_another_version_are_not_claimed_beside(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.work(ann)
    first = claim_of(swarm, most=1)
    assert first.claim is not None
    other = claim_of(swarm, most=4, ready=["f" * 64])
    assert (other.claim, other.beside) == (None, [])
