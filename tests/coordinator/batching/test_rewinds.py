"""The owner returns a run to a version: what came after it is void, a new epoch begins, and nobody loses credit."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.ledger.operator import check, export
from shoal.coordinator.ledger.kept import KeptEvidence
from shoal.coordinator.store.rows import select
from shoal.coordinator.store.tables import GroupRow
from shoal.errors import SignatureError
from shoal.protocol import api
from shoal.protocol.evidence import Receipt, open_evidence
from shoal.protocol.verdicts import Reason
from support.samples import keypair
from support.swarm import TOKENS_PER_GROUP, Swarm, lossy, refusal, running, small_config, submission_state

PAID = 2 * TOKENS_PER_GROUP
"""For one accepted slot."""


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with running(tmp_path, small_config(run={"steps": 20})) as swarm:
        swarm.publish(0)
        yield swarm


def train(swarm: Swarm, steps: int, worker: str = "ann") -> None:
    """That many steps, one accepted slot each."""
    (client,) = swarm.join(worker)
    for _ in range(steps):
        swarm.clock.advance(1.0)
        swarm.produce(client)
        swarm.publish(newest(swarm) + 1)


def newest(swarm: Swarm) -> int:
    return swarm.client("x").status().newest_version


def credit(swarm: Swarm, worker: str = "ann") -> int:
    row = swarm.one("SELECT credit_held, credit_released FROM workers WHERE key=?", keypair(worker).public)
    return int(str(row["credit_held"])) + int(str(row["credit_released"]))


def states(swarm: Swarm) -> dict[str, str]:
    return {row.group_id: str(row.state) for row in swarm.read(lambda connection: select(connection, GroupRow))}


def findings(swarm: Swarm, *receipts: str) -> list[str]:
    opened = [open_evidence(Receipt, text, keypair("coordinator").public) for text in receipts]
    return [found.text for found in check(export(swarm), KeptEvidence(receipts=opened)).findings]


def test_versions_and_batches_after_it_are_void_and_the_credit_stays(swarm: Swarm) -> None:
    train(swarm, 5)
    before = credit(swarm)
    view = swarm.rewind(2)
    assert (view.epoch, view.version, view.newest_before, view.lost_steps) == (1, 2, 5, 3)
    status = swarm.client("x").status()
    assert (status.epoch, status.newest_version, status.step) == (1, 2, 2)
    assert credit(swarm) == before == 5 * PAID
    kept = {name for name, state in states(swarm).items() if state == "consumed"}
    assert kept == {"0/0/0", "0/0/1", "1/0/0", "1/0/1"}
    assert view.groups == 6
    assert swarm.client("x").history().rewinds == [view]
    assert findings(swarm) == []


def test_the_run_goes_on_in_the_new_epoch_with_work_of_its_own(swarm: Swarm) -> None:
    train(swarm, 4)
    (ann,) = swarm.join("ann")
    old = swarm.lease(ann)
    swarm.rewind(2)
    train(swarm, 3)
    assert newest(swarm) == 5
    history = swarm.client("x").history()
    assert [(view.epoch, view.version) for view in history.versions] == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5)]
    assert len({view.manifest_digest for view in history.versions}) == 6
    batch = swarm.batch(2)
    assert batch is not None
    assert [group.group_id for group in batch.groups] == ["1.2.0/0/0", "1.2.0/0/1"]
    lease = swarm.lease(ann)
    assert (lease.epoch, lease.step) == (1, 5)
    assert lease.slot_seed != old.slot_seed
    assert findings(swarm) == []


def test_a_stale_worker_gets_nothing_for_work_of_the_voided_epoch(swarm: Swarm) -> None:
    train(swarm, 3)
    (eve,) = swarm.join("eve")
    leases = [swarm.lease(eve)]
    swarm.rewind(1)
    for lease in leases:
        for _ in range(3):
            assert refusal(lambda: eve.submit(lease.lease_id, b"stale")) == "lease_expired"  # noqa: B023
    assert swarm.all("SELECT * FROM submissions WHERE worker=?", keypair("eve").public) == []
    assert swarm.one("SELECT failures FROM workers WHERE key=?", keypair("eve").public)["failures"] == 0
    lease = swarm.lease(eve)
    assert (lease.epoch, lease.step) == (1, 1), "it works on in the new epoch"


def test_a_lease_whose_answer_was_lost_before_the_rewind_is_not_given_again(swarm: Swarm) -> None:
    train(swarm, 3)
    (bob,) = swarm.join("bob")
    assert swarm.ask(bob, 3, request_id="request-lost").lease is not None
    swarm.rewind(2)
    answer = swarm.ask(bob, 2, request_id="request-lost")
    assert (answer.lease, answer.reason) == (None, "no_work")
    assert swarm.lease(bob, 2).epoch == 1


def test_files_that_had_arrived_are_verified_first_paid_and_used_by_no_batch(swarm: Swarm) -> None:
    train(swarm, 3)
    (ann, bob) = swarm.join("ann", "bob")
    lease, file = swarm.work(bob)
    receipt = bob.submit(lease.lease_id, f"rollouts of {lease.lease_id}".encode()).receipt
    swarm.rewind(1)
    swarm.work(ann, 1)
    claim = swarm.claim()
    assert (claim.submission_id, claim.lease.epoch, claim.lease.step) == (file, 0, 3)
    swarm.accept(claim)
    assert credit(swarm, "bob") == PAID
    assert {states(swarm)[f"3/0/{number}"] for number in range(2)} == {"withdrawn"}
    assert swarm.batch(1) is None
    swarm.accept()
    batch = swarm.batch(1)
    assert batch is not None
    assert all(group.group_id.startswith("1.1.0/") for group in batch.groups)
    assert findings(swarm, receipt) == []


def test_a_file_whose_voided_version_nobody_has_is_quarantined_soon_and_without_a_penalty(swarm: Swarm) -> None:
    train(swarm, 3)
    (bob,) = swarm.join("bob")
    _, file = swarm.work(bob)
    swarm.rewind(1)
    for _ in range(3):
        swarm.reject(Reason.VERSION_GONE)
        swarm.clock.advance(60.0)
        swarm.sweep()
    assert submission_state(swarm, file) == "quarantined"
    assert swarm.one("SELECT rejected FROM workers WHERE key=?", keypair("bob").public)["rejected"] == 0


def test_a_verdict_that_arrives_after_the_rewind_is_recorded(swarm: Swarm) -> None:
    train(swarm, 3)
    (bob, eve) = swarm.join("bob", "eve")
    swarm.work(bob)
    honest = swarm.claim()
    swarm.work(eve)
    forged = swarm.claim()
    swarm.rewind(2)
    swarm.accept(honest)
    swarm.reject(Reason.SAMPLING, claim=forged)
    assert (credit(swarm, "bob"), credit(swarm, "eve")) == (PAID, 0)
    assert swarm.state_of("eve") == "banned"
    train(swarm, 2)
    assert findings(swarm) == []


def test_a_slot_of_a_voided_step_is_paid_once(swarm: Swarm) -> None:
    """Two files of one slot wait for their verdicts when the run is rewound; the new epoch has a slot of the same number."""
    train(swarm, 2)
    (bob, cid) = swarm.join("bob", "cid")
    first, _ = swarm.work(bob)
    swarm.write(lambda c: c.execute("UPDATE slots SET state='leased', due_at=0 WHERE epoch=0 AND step=2 AND slot=0"))
    copy = dict(swarm.one("SELECT * FROM leases WHERE lease_id=?", first.lease_id))
    copy |= {"lease_id": "f" * 32, "worker": keypair("cid").public, "request_id": "backup-1", "state": "leased"}
    columns = ",".join(copy)
    values = tuple(copy.values())
    swarm.write(lambda c: c.execute(f"INSERT INTO leases ({columns}) VALUES ({','.join('?' * len(copy))})", values))
    cid.submit("f" * 32, b"the same slot")
    swarm.rewind(1)
    (dan,) = swarm.join("dan")
    lease, _ = swarm.work(dan, 1)
    assert (lease.epoch, lease.step, lease.slot) == (1, 1, 0)
    for _ in range(3):
        swarm.accept()
    uses = [json.loads(str(row["body"]))["use"] for row in swarm.all("SELECT body FROM ledger WHERE kind='verdict'")]
    assert uses == ["counts", "counts", "counts", "further", "counts"]
    assert credit(swarm, "bob") + credit(swarm, "cid") == PAID


def test_a_trainer_of_the_old_epoch_can_neither_train_nor_publish(swarm: Swarm) -> None:
    """A publisher that is in flight loses: its version is never recorded."""
    train(swarm, 3)
    (ann,) = swarm.join("ann")
    swarm.produce(ann)
    proposed = swarm.batch(3)
    assert proposed is not None
    swarm.rewind(2)
    trainer = swarm.client("trainer")
    stale = api.VersionBody(version=4, manifest_digest="4" * 64, weights_digest="4" * 64, bytes_total=1)
    screening = api.ScreeningBody(step=3, attempt=0, statistics={one.group_id: 0.0 for one in proposed.groups})
    assert refusal(lambda: trainer.publish(stale)) == "rewound"
    assert refusal(lambda: trainer.publish(stale.model_copy(update={"version": 3}))) == "rewound"
    assert refusal(lambda: trainer.screen(screening)) == "rewound"
    assert refusal(lambda: trainer.batch(3, 0)) == "rewound"
    recall = api.RecallBody(epoch=0, step=1, attempt=0, reason="diverged")
    assert refusal(lambda: trainer.recall(recall)) == "rewound"
    assert newest(swarm) == 2


def test_the_version_that_the_run_returned_to_may_be_recorded_again_with_its_own_bytes_only(swarm: Swarm) -> None:
    train(swarm, 3)
    swarm.rewind(1)
    digest = f"{1:064x}"
    swarm.publish(1, digest)
    assert refusal(lambda: swarm.publish(1, "7" * 64)) == "version_conflict"


def test_only_the_run_key_rewinds(swarm: Swarm) -> None:
    train(swarm, 2)
    for name in ("trainer", "validator", "ann"):
        assert refusal(lambda: swarm.client(name).rewind(swarm.rewind_body(1))) == "owner"  # noqa: B023
    forged = swarm.rewind_body(1, key="coordinator")
    assert refusal(lambda: swarm.client("run").rewind(forged)) == SignatureError.code
    assert swarm.epoch() == 0


def test_a_repeated_request_rewinds_once(swarm: Swarm) -> None:
    train(swarm, 3)
    body = swarm.rewind_body(1)
    client, bridge = lossy(swarm, "run")
    bridge.lose_answers = 1
    first = client.rewind(body)
    train(swarm, 1)
    assert client.rewind(body) == first
    assert (swarm.epoch(), newest(swarm)) == (1, 2)


def test_two_owners_at_once_do_not_rewind_twice(swarm: Swarm) -> None:
    train(swarm, 4)
    one, other = swarm.rewind_body(3), swarm.rewind_body(1)
    swarm.client("run").rewind(one)
    assert refusal(lambda: swarm.client("run").rewind(other)) == "epoch"
    assert newest(swarm) == 3


def test_a_run_may_be_rewound_again_and_again(swarm: Swarm) -> None:
    train(swarm, 4)
    swarm.rewind(3)
    swarm.rewind(1)
    train(swarm, 2)
    view = swarm.rewind(2)
    assert (view.epoch, view.newest_before) == (3, 3)
    train(swarm, 3)
    epochs = [version.epoch for version in swarm.client("x").history().versions]
    assert epochs == [0, 0, 2, 3, 3, 3]
    assert findings(swarm) == []


def test_a_run_may_be_rewound_to_its_beginning(swarm: Swarm) -> None:
    train(swarm, 2)
    assert swarm.rewind(0).groups == 4
    train(swarm, 2)
    assert credit(swarm) == 4 * PAID
    assert findings(swarm) == []


@pytest.mark.parametrize(
    ("version", "code"), [(3, "unknown_version"), (9, "unknown_version"), (2, "nothing_to_rewind")]
)
def test_what_cannot_be_is_refused(swarm: Swarm, version: int, code: str) -> None:
    train(swarm, 2)
    assert refusal(lambda: swarm.rewind(version)) == code
    assert refusal(lambda: swarm.client("run").rewind(swarm.rewind_body(1, epoch=2))) == "epoch"
    assert swarm.epoch() == 0


def test_a_batch_that_is_being_trained_may_be_voided_too(swarm: Swarm) -> None:
    train(swarm, 2)
    swarm.produce(swarm.client("ann"))
    assert swarm.batch(2) is not None
    assert swarm.rewind(2).lost_steps == 0
    assert swarm.batch(2) is None


def test_a_recalled_batch_is_voided_and_its_audits_still_end_careers(swarm: Swarm) -> None:
    (ann, eve) = swarm.join("ann", "eve")
    swarm.produce(ann)
    swarm.publish(1)
    _, file = swarm.work(eve)
    swarm.write(lambda c: c.execute("UPDATE submissions SET audit_groups='[]' WHERE submission_id=?", (file,)))
    swarm.accept()
    swarm.record(1)
    swarm.client("trainer").recall(api.RecallBody(step=1, attempt=0, reason="kl_update is 7"))
    claim = swarm.claim()
    swarm.rewind(0)
    swarm.reject(Reason.SAMPLING, claim=claim)
    assert swarm.state_of("eve") == "banned"
    train(swarm, 2)


def test_what_the_voided_steps_were_trained_on_is_audited_if_the_owner_asks(swarm: Swarm) -> None:
    """Poison that shows only after versions were trained on it: the run returns, the forger is found, and nothing is reused."""
    (ann, eve) = swarm.join("ann", "eve")
    swarm.produce(ann)
    swarm.publish(1)
    swarm.write(lambda connection: connection.execute("UPDATE workers SET state='active', clean_audits=1000000"))
    _, file = swarm.work(eve)
    swarm.write(lambda c: c.execute("UPDATE submissions SET audit_groups='[]' WHERE submission_id=?", (file,)))
    swarm.accept()
    swarm.publish(2)
    assert refusal(lambda: swarm.client("run").recall_by_hand(api.RecallBody(step=1, reason="odd"))) == "batch_trained"
    assert swarm.rewind(1, audit=True).audits == 1
    claim = swarm.claim()
    assert (claim.submission_id, claim.audit_groups) == (file, [0, 1])
    swarm.reject(Reason.SAMPLING, claim=claim)
    assert swarm.state_of("eve") == "banned"
    train(swarm, 1)
    assert newest(swarm) == 2


def test_a_finished_run_goes_on_after_a_rewind(tmp_path: Path) -> None:
    with running(tmp_path, small_config(run={"steps": 2})) as swarm:
        swarm.publish(0)
        train(swarm, 2)
        assert swarm.client("x").status().run_state == "finished"
        swarm.rewind(1)
        assert swarm.client("x").status().run_state == "running"
        train(swarm, 1)
        assert swarm.client("x").status().run_state == "finished"


def test_a_measurement_of_a_voided_version_is_dropped(swarm: Swarm) -> None:
    train(swarm, 2)
    digest = swarm.client("x").history().versions[2].manifest_digest
    body = api.EvaluationBody(
        version=2, accuracy=0.5, problems=9, samples=1, mean_tokens=3, seconds=1, manifest_digest=digest
    )
    swarm.rewind(1)
    swarm.client("evaluator").report_evaluation(body)
    train(swarm, 1)
    swarm.client("evaluator").report_evaluation(body)
    assert swarm.client("x").history().evaluations == []


def test_a_rewind_is_one_transaction(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at any of its writes, nothing has happened; asked again, everything does."""
    train(swarm, 3)
    (bob,) = swarm.join("bob")
    swarm.work(bob)
    tables = ("batches", "versions", "groups", "leases", "slots", "ledger", "meta", "rewinds", "submissions")

    def content() -> list[list[dict[str, object]]]:
        return [swarm.all(f"SELECT * FROM {table}") for table in tables]

    before, body = content(), swarm.rewind_body(1)
    for point in ("slots.withdraw_groups", "meta.write", "secrets.begin_epoch", "insert", "ledger.append"):
        with monkeypatch.context() as patch:

            def die(*arguments: object, **settings: object) -> None:
                raise RuntimeError("killed")

            patch.setattr(f"shoal.coordinator.batching.rewinds.{point}", die)
            assert refusal(lambda: swarm.client("run", deadline_s=0.0).rewind(body)) != ""
        assert content() == before, point
    swarm.client("run").rewind(body)
    assert (swarm.epoch(), newest(swarm)) == (1, 1)
    files = swarm.all("SELECT submission_id FROM submissions ORDER BY received_at")
    assert submission_state(swarm, str(files[-1]["submission_id"])) == "pending"
