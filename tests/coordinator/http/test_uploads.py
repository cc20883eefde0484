"""What is taken in, under which name, and what is refused before it fills the disk."""

import os
from pathlib import Path

import pytest

from shoal.coordinator.store.database import Connection
from shoal.errors import UnavailableError
from shoal.files import digest_bytes
from shoal.protocol.client import SUBMISSION_SIGNATURE_HEADER, CoordinatorClient
from shoal.protocol.signing import BODY_HEADER, RequestTarget, stamp_request, submission_message
from support.samples import keypair
from support.swarm import TEST_DATABASE, Swarm, lossy, page_count, refusal, registration, running, small_config


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
    assert swarm.run.file_of(answer.submission_id).read_bytes() == b"rollouts"


def test_an_upload_whose_answer_was_lost_is_kept_once(swarm: Swarm) -> None:
    swarm.publish(0)
    swarm.join("ann")
    ann, bridge = lossy(swarm, "ann")
    lease = swarm.lease(ann)
    bridge.lose_answers = 2
    answer = ann.submit(lease.lease_id, b"rollouts")
    assert [path.stem for path in swarm.run.submissions.iterdir()] == [answer.submission_id]
    assert len(swarm.all("SELECT * FROM submissions")) == 1


def test_the_same_upload_is_recognised_even_after_its_verdict(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)
    first = ann.submit(lease.lease_id, b"rollouts")
    swarm.accept()
    swarm.clock.advance(100)
    again = ann.submit(lease.lease_id, b"rollouts")
    assert (again.submission_id, again.state) == (first.submission_id, "decided")
    assert len(list(swarm.run.submissions.iterdir())) == 1


def test_a_lease_is_answered_by_one_file(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease, _ = swarm.work(ann)
    assert refusal(lambda: ann.submit(lease.lease_id, b"on second thought")) == "already_submitted"
    assert len(list(swarm.run.submissions.iterdir())) == 1


def test_an_upload_after_the_deadline_is_refused(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)
    swarm.clock.advance(15.1)
    assert refusal(lambda: ann.submit(lease.lease_id, b"late")) == "lease_expired"
    assert list(swarm.run.submissions.iterdir()) == []


def test_an_upload_that_is_too_large_is_refused_and_removed(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)
    assert refusal(lambda: ann.submit(lease.lease_id, b"x" * 10_001)) == "too_large"
    assert list(swarm.run.submissions.iterdir()) == []
    ann.submit(lease.lease_id, b"x" * 10_000)


def upload(swarm: Swarm, lease_id: str, data: bytes, *, signed: bytes, **headers: str) -> tuple[int, str]:
    """Sends ann's upload as the client would send `signed`, with some headers replaced."""
    ann, target, digest = keypair("ann"), f"/v1/submissions/{lease_id}", digest_bytes(signed)
    audience = swarm.run.descriptor.coordinator_key
    signed_target = RequestTarget("run-1", audience, "PUT", target, "", digest)
    stamp = stamp_request(ann, signed_target, swarm.clock())
    evidence = ann.sign(submission_message("run-1", lease_id, digest))
    own = {BODY_HEADER: digest, SUBMISSION_SIGNATURE_HEADER: evidence}
    answer = swarm.http.put(target, content=data, headers=stamp.headers() | own | headers)
    return answer.status_code, answer.json().get("code", "")


def test_bytes_other_than_the_signed_ones_are_refused_and_removed(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease_id = swarm.lease(ann).lease_id
    assert upload(swarm, lease_id, b"delivered", signed=b"promised") == (400, "digest")
    assert list(swarm.run.submissions.iterdir()) == []
    assert swarm.one("SELECT state FROM leases") == {"state": "leased"}
    assert upload(swarm, lease_id, b"promised", signed=b"promised") == (200, "")


@pytest.mark.parametrize("header", [SUBMISSION_SIGNATURE_HEADER, BODY_HEADER, "x-shoal-signature"])
@pytest.mark.parametrize("value", ["", "00" * 64])
def test_an_upload_without_evidence_is_refused(swarm: Swarm, header: str, value: str) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease_id = swarm.lease(ann).lease_id
    assert upload(swarm, lease_id, b"data", signed=b"data", **{header: value}) == (401, "bad_signature")
    assert list(swarm.run.submissions.iterdir()) == []


def test_strangers_cannot_fill_the_disk(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.coordinator.http.handlers.uploads.stream_to_disk", None)
    answer = swarm.http.put("/v1/submissions/anything", content=b"x" * 5000)
    assert (answer.status_code, answer.json()["code"]) == (401, "bad_signature")
    assert refusal(lambda: swarm.client("stranger").submit("0" * 32, b"x" * 5000)) == "unknown_worker"


def test_when_uploads_cannot_be_stored_nothing_is_lost(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)
    rollouts = swarm.run.submissions
    swarm.alter(submissions=rollouts / "unmounted")
    with pytest.raises(UnavailableError, match=r"503: The upload cannot be stored: No such file"):
        ann.submit(lease.lease_id, b"rollouts")
    swarm.alter(submissions=rollouts)
    assert swarm.one("SELECT state FROM leases") == {"state": "leased"}
    assert ann.submit(lease.lease_id, b"rollouts").state == "pending"


def fill(worker: CoordinatorClient) -> None:
    for _ in range(200):
        worker.register(registration("a" * 200))


@pytest.mark.skipif(bool(os.environ.get(TEST_DATABASE)), reason="only SQLite can limit its disk")
def test_when_the_store_is_full_intake_stops_with_a_clear_error(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)

    def squeeze(connection: Connection, pages: int) -> None:
        connection.execute(f"PRAGMA max_page_count={pages}").fetchone()

    used = swarm.write(lambda connection: page_count(connection))
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
        assert swarm.claim().audit_groups
        swarm.write(lambda connection: connection.execute("UPDATE workers SET state='active', clean_audits=1000000"))
        swarm.work(ann)
        assert not swarm.claim().audit_groups
