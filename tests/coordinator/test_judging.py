import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.swarm import TOKENS_PER_GROUP, Bridge, Swarm, running, small_config, verdict_of
from protocol.samples import keypair
from shoal.coordinator import retries
from shoal.coordinator.ledger import LedgerError, check_draws, verify_export
from shoal.errors import RefusedError
from shoal.protocol import api
from shoal.protocol.verdicts import Reason

PATIENCE_S = 60


def submission_state(swarm: Swarm, submission_id: str) -> object:
    return swarm.one("SELECT state FROM submissions WHERE submission_id=?", submission_id)["state"]


def ledger_kinds(swarm: Swarm) -> list[object]:
    return [row["kind"] for row in swarm.all("SELECT kind FROM ledger ORDER BY seq")]


# Claims


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
    assert claim.audit
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


def test_a_waiting_validator_is_told_that_the_run_is_finished(tmp_path: Path) -> None:
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
        swarm.http.portal.call(swarm.app.state.service.stop_waiting)
        assert validator.result(PATIENCE_S).claim is None
        assert "useful groups" in trainer.result(PATIENCE_S).waiting_for


def test_a_trainer_that_waits_in_vain_is_told_for_whom(swarm: Swarm) -> None:
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


# Verdicts


def test_a_repeated_verdict_counts_once(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.work(ann)
    validator = swarm.client("validator")
    bridge = validator._http._transport
    assert isinstance(bridge, Bridge)
    bridge.lose_answers = 2
    body = verdict_of(swarm.claim(), useful=1)
    assert validator.verdict(body).recorded
    assert validator.verdict(body).recorded
    row = swarm.one("SELECT accepted, credit_held, clean_audits FROM workers")
    assert row == {"accepted": 1, "credit_held": 2 * TOKENS_PER_GROUP, "clean_audits": 1}
    assert ledger_kinds(swarm).count("credit") == 1


def test_a_repeated_rejection_counts_once(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.work(ann)
    body = swarm.reject(Reason.LOGPROBS)
    swarm.judge(body)
    assert swarm.one("SELECT rejected, anomalies FROM workers") == {"rejected": 1, "anomalies": 1}


def test_a_repeated_fault_counts_once(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.work(ann)
    body = swarm.reject(Reason.VALIDATOR_CRASH)
    swarm.judge(body)
    assert swarm.one("SELECT state, tries FROM submissions") == {"state": "pending", "tries": 1}


def test_a_verdict_about_nothing_is_refused(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.work(ann)
    body = verdict_of(swarm.claim(), submission_id="no-such-one")
    with pytest.raises(RefusedError) as caught:
        swarm.client("validator").verdict(body)
    assert caught.value.code == "unknown_submission"


def test_credit_is_held_as_stake_and_released_beyond_it(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    credits = []
    for _ in range(3):
        swarm.produce(ann, useful=0)
        row = swarm.one("SELECT credit_held, credit_released FROM workers")
        credits.append((row["credit_held"], row["credit_released"]))
    assert credits == [(20, 0), (30, 10), (30, 30)]


def test_clean_audits_make_a_key_active(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.produce(ann, useful=0)
    assert swarm.state_of("ann") == "probation"
    swarm.produce(ann, useful=0)
    assert swarm.state_of("ann") == "active"


def test_work_that_was_not_audited_earns_credit_but_no_trust(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.work(ann)
    swarm.accept(audited=False)
    assert swarm.one("SELECT clean_audits, credit_held FROM workers") == {"clean_audits": 0, "credit_held": 20}


def test_a_quarantined_key_is_judged_but_not_used_and_finds_its_way_out(tmp_path: Path) -> None:
    with running(tmp_path, small_config(training={"groups_per_step": 8, "oversampling": 8.0})) as swarm:
        swarm.publish(0)
        ann, bob = swarm.join("ann", "bob")
        for _ in range(3):
            swarm.work(ann)
            swarm.reject(Reason.LOGPROBS)
        assert swarm.state_of("ann") == "quarantined"
        unused = swarm.produce(ann)
        assert swarm.all("SELECT * FROM groups") == []
        assert swarm.one("SELECT credit_held FROM workers WHERE name='ann'") == {"credit_held": 0}
        assert unused.slot in [swarm.produce(bob, useful=0).slot for _ in range(4)]
        swarm.produce(ann)
        assert swarm.state_of("ann") == "suspect"
        swarm.produce(ann)
        assert swarm.one("SELECT credit_held FROM workers WHERE name='ann'") == {"credit_held": 20}


def test_falling_silent_does_not_lead_out_of_quarantine(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    for _ in range(3):
        swarm.work(ann)
        swarm.reject(Reason.LOGPROBS)
    swarm.work(ann)
    swarm.clock.advance(31)
    swarm.sweep()
    assert swarm.state_of("ann") == "gone"
    swarm.accept()
    assert swarm.all("SELECT * FROM groups") == []


def test_a_fault_is_tried_again_and_then_set_aside_without_blame(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    lease, submission_id = swarm.work(ann)
    for tries in (1, 2):
        swarm.reject(Reason.VALIDATOR_CRASH)
        assert swarm.one("SELECT state, tries FROM submissions") == {"state": "pending", "tries": tries}
        swarm.clock.advance(10)
    swarm.reject(Reason.FILE_GONE)
    assert submission_state(swarm, submission_id) == "set_aside"
    assert "set_aside" in ledger_kinds(swarm)
    row = swarm.one("SELECT rejected, anomalies, state FROM workers WHERE name='ann'")
    assert row == {"rejected": 0, "anomalies": 0, "state": "probation"}
    assert swarm.lease(bob).slot == lease.slot
    assert ann.status().verdicts["set_aside"] == 1


def next_claim(swarm: Swarm) -> api.Claim | None:
    return swarm.client("validator").claim(api.ClaimBody(request_id=swarm.new_id(), wait_s=0)).claim


def test_a_fault_is_not_retried_at_once_and_waits_double(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.work(ann)
    for wait_s in (2, 4):
        swarm.reject(Reason.VALIDATOR_CRASH)
        swarm.clock.advance(wait_s - 0.1)
        assert next_claim(swarm) is None
        assert not swarm.sweep()
        swarm.clock.advance(0.2)
        assert swarm.sweep(), "whoever waits must look again"


def test_an_outage_of_the_relays_uses_up_no_tries(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    _, submission_id = swarm.work(ann)
    for _ in range(12):
        swarm.reject(Reason.VERSION_GONE)
        swarm.clock.advance(60)
    assert swarm.one("SELECT state, tries FROM submissions") == {"state": "pending", "tries": 0}
    swarm.accept()
    assert submission_state(swarm, submission_id) == "judged"


def test_a_version_that_stays_lost_does_not_hold_a_step_for_ever(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    _, submission_id = swarm.work(ann)
    swarm.clock.advance(retries.OUTAGE_S + 1)
    for _ in range(3):
        swarm.reject(Reason.VERSION_GONE)
        swarm.clock.advance(60)
    assert submission_state(swarm, submission_id) == "set_aside"
    assert swarm.one("SELECT rejected, anomalies FROM workers") == {"rejected": 0, "anomalies": 0}


def test_a_file_that_kills_every_validator_is_set_aside(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    _, submission_id = swarm.work(ann)
    for _ in range(3):
        swarm.claim()
        swarm.clock.advance(20.1)
        ann.heartbeat(api.HeartbeatBody(activity=""))
        swarm.sweep()
    assert submission_state(swarm, submission_id) == "set_aside"
    assert swarm.state_of("ann") == "probation"


def test_a_rejection_without_reasons_blames_nobody(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.work(ann)
    swarm.reject()
    assert swarm.one("SELECT state FROM submissions") == {"state": "pending"}


def test_a_verdict_that_comes_after_the_ban_changes_nothing(swarm: Swarm) -> None:
    swarm.publish(0)
    (eve,) = swarm.join("eve")
    swarm.work(eve)
    swarm.work(eve)
    first, second = swarm.claim(), swarm.claim()
    swarm.reject(Reason.REWARD, claim=first)
    assert not swarm.client("validator").verdict(verdict_of(second)).recorded
    assert swarm.all("SELECT * FROM groups") == []
    assert swarm.one("SELECT credit_held FROM workers") == {"credit_held": 0}
    assert ledger_kinds(swarm).count("ban") == 1


def test_groups_in_a_formed_batch_stay_when_their_maker_is_banned(swarm: Swarm) -> None:
    swarm.publish(0)
    (eve,) = swarm.join("eve")
    swarm.produce(eve)
    swarm.work(eve)
    swarm.reject(Reason.REWARD)
    batch = swarm.client("trainer").batch(0, wait_s=0).batch
    assert batch is not None
    assert len(batch.groups) == 2


def test_no_group_is_consumed_twice(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    for step in range(3):
        while swarm.client("trainer").batch(step, wait_s=0).batch is None:
            swarm.produce(ann if step else bob, useful=1)
        swarm.publish(step + 1)
    consumed = [
        group.group_id
        for step in range(3)
        for group in getattr(swarm.client("trainer").batch(step, wait_s=0).batch, "groups", [])
    ]
    assert len(consumed) == len(set(consumed)) == 6


# Versions and evaluations


def test_a_version_is_published_once(swarm: Swarm) -> None:
    first = swarm.publish(0)
    assert swarm.publish(0) == first
    assert ledger_kinds(swarm).count("version") == 1


@pytest.mark.parametrize("field", ["manifest_digest", "weights_digest"])
def test_a_number_never_gets_other_bytes(swarm: Swarm, field: str) -> None:
    swarm.publish(0)
    digest = f"{0:064x}"
    body = api.VersionBody(version=0, manifest_digest=digest, weights_digest=digest, bytes_total=100)
    with pytest.raises(RefusedError) as caught:
        swarm.client("trainer").publish(body.model_copy(update={field: "f" * 64}))
    assert (caught.value.code, caught.value.status) == ("version_conflict", 409)


@pytest.mark.parametrize("version", [1, 2, 7])
def test_versions_come_in_order_and_after_their_batch(swarm: Swarm, version: int) -> None:
    swarm.publish(0)
    with pytest.raises(RefusedError) as caught:
        swarm.publish(version)
    assert caught.value.code == "version_order"


def test_an_evaluation_is_recorded_once(swarm: Swarm) -> None:
    body = api.EvaluationBody(version=0, accuracy=0.25, problems=512, samples=1, mean_tokens=9.5, seconds=3)
    evaluator = swarm.client("evaluator")
    evaluator.report_evaluation(body)
    swarm.clock.advance(5)
    evaluator.report_evaluation(body.model_copy(update={"accuracy": 0.9}))
    assert [(view.accuracy, view.at_s) for view in evaluator.history().evaluations] == [(0.25, 0.0)]


def test_time_alone_completes_a_step_that_a_lost_slot_held_back(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    swarm.lease(bob)
    swarm.produce(ann)
    trainer = swarm.client("trainer")
    assert trainer.batch(0, wait_s=0).batch is None
    swarm.clock.advance(10.1)
    assert swarm.sweep()
    batch = trainer.batch(0, wait_s=0).batch
    assert batch is not None
    assert [group.group_id for group in batch.groups] == ["0/1/0", "0/1/1"]


# The audit draw


def audited_late(swarm: Swarm) -> list[dict[str, Any]]:
    """Ann's file completes the batch of step 0; bob's file of that step comes after the step's secret is public."""
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    swarm.work(ann)
    late = swarm.lease(bob)
    swarm.accept()
    bob.submit(late.lease_id, b"late")
    swarm.accept()
    return [json.loads(str(row["body"])) for row in swarm.all("SELECT body FROM ledger WHERE kind='verdict'")]


def test_the_draw_uses_the_step_that_is_open_when_the_file_arrives(swarm: Swarm) -> None:
    first, *_, last = audited_late(swarm)
    assert (first["step"], first["audit_step"]) == (0, 0)
    assert last["step"] == 0
    assert last["audit_step"] > 0, "the secret of step 0 was public when this file was made"
    assert last["audit_rate"] == 1.0


def test_everybody_can_repeat_the_draws_from_an_export(swarm: Swarm) -> None:
    audited_late(swarm)
    export = swarm.client("x").ledger_export().splitlines()
    entries, _ = verify_export(export, keypair("coordinator").public)
    formed = swarm.all("SELECT step FROM batches")
    assert check_draws(entries) == len(formed) > 0, "one file arrived during each step"


def test_an_audit_that_the_draw_does_not_explain_is_located(swarm: Swarm) -> None:
    audited_late(swarm)
    entries, _ = verify_export(swarm.client("x").ledger_export().splitlines(), keypair("coordinator").public)
    number = next(number for number, entry in enumerate(entries) if entry.kind == "verdict")
    lie = json.loads(entries[number].body) | {"audit_drawn": False}
    entries[number] = replace(entries[number], body=json.dumps(lie))
    with pytest.raises(LedgerError, match=f"Line {number + 1}: the draw of step 0"):
        check_draws(entries)
