"""Verdicts and all that follows from them."""

from pathlib import Path

import pytest

from shoal.coordinator.rules import retries
from shoal.coordinator.work import verdicts
from shoal.errors import RefusedError
from shoal.protocol import api
from shoal.protocol.verdicts import Reason
from support.samples import keypair
from support.swarm import (
    TOKENS_PER_GROUP,
    Bridge,
    Swarm,
    ledger_kinds,
    refusal,
    running,
    small_config,
    submission_state,
    verdict_of,
)


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
    swarm.send_verdict(body)
    assert swarm.one("SELECT rejected, anomalies FROM workers") == {"rejected": 1, "anomalies": 1}


def test_a_repeated_fault_counts_once(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.work(ann)
    body = swarm.reject(Reason.VALIDATOR_CRASH)
    swarm.send_verdict(body)
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


def test_groups_that_were_audited_have_verified_logprobs_and_earn_a_part_of_the_trust(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.work(ann)
    swarm.accept(audited_groups=[1])
    assert swarm.one("SELECT clean_audits FROM workers") == {"clean_audits": 0.5}
    verified = swarm.all("SELECT number, logprobs_verified FROM groups ORDER BY number")
    assert [(row["number"], row["logprobs_verified"]) for row in verified] == [(0, 0), (1, 1)]


def test_work_that_was_not_audited_earns_credit_but_no_trust(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.work(ann)
    swarm.accept(audited_groups=[])
    assert swarm.one("SELECT clean_audits, credit_held FROM workers") == {"clean_audits": 0, "credit_held": 20}


def test_a_quarantined_key_is_verified_but_not_used_and_finds_its_way_out(tmp_path: Path) -> None:
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


def test_a_fault_is_tried_again_and_then_quarantined_without_a_penalty(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    lease, submission_id = swarm.work(ann)
    for tries in (1, 2):
        swarm.reject(Reason.VALIDATOR_CRASH)
        assert swarm.one("SELECT state, tries FROM submissions") == {"state": "pending", "tries": tries}
        swarm.clock.advance(10)
    swarm.reject(Reason.FILE_GONE)
    assert submission_state(swarm, submission_id) == "quarantined"
    assert "quarantine" in ledger_kinds(swarm)
    row = swarm.one("SELECT rejected, anomalies, state FROM workers WHERE name='ann'")
    assert row == {"rejected": 0, "anomalies": 0, "state": "probation"}
    assert swarm.lease(bob).slot == lease.slot
    assert ann.status().verdicts["quarantined"] == 1


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
        assert swarm.sweep(), "waiting requests must look again"


def test_an_outage_of_the_relays_uses_up_no_tries(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    _, submission_id = swarm.work(ann)
    for _ in range(12):
        swarm.reject(Reason.VERSION_GONE)
        swarm.clock.advance(60)
    assert swarm.one("SELECT state, tries FROM submissions") == {"state": "pending", "tries": 0}
    swarm.accept()
    assert submission_state(swarm, submission_id) == "decided"


def test_a_version_that_stays_lost_does_not_hold_a_step_for_ever(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    _, submission_id = swarm.work(ann)
    swarm.clock.advance(retries.VERSION_OUTAGE_S + 1)
    for _ in range(3):
        swarm.reject(Reason.VERSION_GONE)
        swarm.clock.advance(60)
    assert submission_state(swarm, submission_id) == "quarantined"
    assert swarm.one("SELECT rejected, anomalies FROM workers") == {"rejected": 0, "anomalies": 0}


def test_a_file_that_kills_every_validator_is_quarantined(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    _, submission_id = swarm.work(ann)
    for _ in range(3):
        swarm.claim()
        swarm.clock.advance(20.1)
        ann.heartbeat(api.HeartbeatBody(activity=""))
        swarm.sweep()
    assert submission_state(swarm, submission_id) == "quarantined"
    assert swarm.state_of("ann") == "probation"


def test_a_rejection_without_reasons_is_not_a_penalty(swarm: Swarm) -> None:
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


def test_groups_in_a_recorded_batch_stay_when_their_maker_is_banned(swarm: Swarm) -> None:
    swarm.publish(0)
    (eve,) = swarm.join("eve")
    swarm.produce(eve)
    swarm.record(0)
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


def test_a_ban_that_is_rolled_back_leaves_the_key_present(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm.publish(0)
    (eve,) = swarm.join("eve")
    swarm.work(eve)

    def fail(*_: object) -> bool:
        raise RefusedError("late", "Something after the ban went wrong.")

    body = verdict_of(swarm.claim(), accepted=False, reasons=[Reason.REWARD], groups=[])
    with monkeypatch.context() as patch:
        patch.setattr(verdicts, "advance", fail)
        assert refusal(lambda: swarm.client("validator").verdict(body)) == "late"
    assert swarm.state_of("eve") == "probation"
    assert swarm.run.presence.is_present(keypair("eve").public)
    swarm.send_verdict(body)
    assert swarm.state_of("eve") == "banned"
    assert not swarm.run.presence.is_present(keypair("eve").public)
