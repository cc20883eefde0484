"""The whole walk through the real app: register, lease, submit, claim, verdict, batch, version, evaluation."""

import json
import os
from pathlib import Path
from statistics import fmean

import pytest

from shoal.coordinator.ledger import balances, verify_export
from shoal.files import digest_bytes
from shoal.protocol import api
from shoal.protocol.assignment import slot_seed
from shoal.protocol.client import fetch_descriptor
from shoal.protocol.steps import StepId, step_secret
from shoal.protocol.verdicts import Reason
from support.samples import RUN_SECRET, keypair
from support.swarm import TOKENS_PER_GROUP, Swarm, running, small_config


def test_a_run_from_the_first_registration_to_its_end(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    trainer, evaluator = swarm.client("trainer"), swarm.client("evaluator")
    for step in range(3):
        assert trainer.batch(step, wait_s=0).batch is None
        lease = swarm.produce(ann if step % 2 else bob)
        assert (lease.step, lease.policy_version) == (step, step)
        batch = trainer.batch(step, wait_s=0).batch
        assert batch is not None
        assert [group.group_id for group in batch.groups] == [f"{step}/0/0", f"{step}/0/1"]
        data = trainer.submission_file(batch.groups[0].submission_id, batch.groups[0].digest)
        assert digest_bytes(data) == batch.groups[0].digest
        swarm.publish(step + 1)
        assert trainer.status().run_state == ("finished" if step == 2 else "running")
        body = api.EvaluationBody(
            version=step + 1, accuracy=0.5, problems=100, samples=1, mean_tokens=20.0, seconds=1.0
        )
        evaluator.report_evaluation(body)

    assert swarm.ask(ann, 3).reason == "finished"
    status, history = ann.status(), ann.history()
    assert (status.run_state, status.step, status.newest_version) == ("finished", 3, 3)
    assert status.age_histogram == {0: 6}
    assert [view.version for view in history.versions] == [0, 1, 2, 3]
    assert [view.version for view in history.evaluations] == [1, 2, 3]
    assert [batch["groups"] for batch in history.batches] == [2, 2, 2]

    entries, run_id = verify_export(swarm.whole_ledger().splitlines(keepends=True), keypair("coordinator").public)
    assert run_id == "run-1"
    earned = {worker.key: worker.credit_held + worker.credit_released for worker in status.workers}
    assert {key: account["held"] + account["released"] for key, account in balances(entries).items()} == earned
    assert sum(earned.values()) == 6 * TOKENS_PER_GROUP
    assert entries[-1].hash == swarm.client("x").status().ledger_head


def test_the_lease_reveals_its_slot_seed_and_nothing_else(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    first, second = swarm.lease(ann), swarm.lease(ann)
    secret = step_secret(RUN_SECRET, StepId(step=0))
    assert first.slot_seed == slot_seed(secret, 0).hex()
    assert second.slot_seed == slot_seed(secret, 1).hex()
    export = swarm.whole_ledger()
    assert secret.hex().encode() not in export
    assert RUN_SECRET.hex().encode() not in export


def test_the_step_secret_is_published_when_the_batch_is_recorded(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.produce(ann)
    assert step_secret(RUN_SECRET, StepId(step=0)).hex().encode() not in swarm.whole_ledger(), (
        "the proposal may still change"
    )
    swarm.record(0)
    export = swarm.whole_ledger()
    assert step_secret(RUN_SECRET, StepId(step=0)).hex().encode() in export
    assert step_secret(RUN_SECRET, StepId(step=1)).hex().encode() not in export


def test_the_descriptor_is_served_as_it_was_signed(swarm: Swarm) -> None:
    http = swarm.client("anyone")._http
    _, opened = fetch_descriptor("http://coordinator", keypair("run").public, http=http)
    assert opened == swarm.run.descriptor


def test_a_group_that_comes_late_goes_to_the_next_batch(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    swarm.produce(ann, useful=1)
    late = swarm.lease(bob)
    swarm.produce(ann, useful=0)
    # bob's slot came first, so it holds later ones back until its lease runs out.
    other = swarm.lease(ann)
    assert (late.slot, other.slot) == (1, 3)
    bob.submit(late.lease_id, b"late rollouts")
    late_claim = swarm.claim()
    ann.submit(other.lease_id, b"more rollouts")
    swarm.accept(useful=1)
    assert swarm.client("trainer").batch(0, wait_s=0).batch is None
    swarm.accept(late_claim, useful=2)
    first = swarm.client("trainer").batch(0, wait_s=0).batch
    assert first is not None
    assert [group.group_id for group in first.groups] == ["0/0/0", "0/1/0"]
    assert first.dropped == {"no_signal": 4, "carried_over": 2}

    swarm.publish(1)
    swarm.sweep()
    second = swarm.client("trainer").batch(1, wait_s=0).batch
    assert second is not None
    assert [group.group_id for group in second.groups] == ["0/1/1", "0/3/0"]
    assert ann.status().age_histogram == {0: 2, 1: 2}


def test_work_submitted_after_its_batch_was_formed_is_carried_over(tmp_path: Path) -> None:
    with running(tmp_path, small_config(training={"groups_per_step": 1})) as swarm:
        swarm.publish(0)
        ann, bob = swarm.join("ann", "bob")
        quick, slow = swarm.lease(ann), swarm.lease(bob)
        ann.submit(quick.lease_id, b"quick")
        swarm.accept(useful=1)
        assert swarm.client("trainer").batch(0, wait_s=0).batch is not None
        bob.submit(slow.lease_id, b"slow")
        swarm.accept(useful=1)
        swarm.sweep()
        batch = swarm.client("trainer").batch(1, wait_s=0).batch
        assert batch is not None
        assert [group.group_id for group in batch.groups] == ["0/1/0"]


def test_groups_expire_without_penalty_when_they_are_too_old(tmp_path: Path) -> None:
    with running(tmp_path, small_config(training={"groups_per_step": 1, "async_level": 0})) as swarm:
        swarm.publish(0)
        ann, bob = swarm.join("ann", "bob")
        swarm.produce(ann, useful=2)
        swarm.publish(1)
        swarm.produce(ann, useful=1)
        batch = swarm.client("trainer").batch(1, wait_s=0).batch
        assert batch is not None
        assert [group.group_id for group in batch.groups] == ["1/0/0"]
        assert batch.dropped == {"no_signal": 1, "expired": 1}
        assert swarm.one("SELECT state FROM groups WHERE group_id='0/0/1'") == {"state": "expired"}
        assert swarm.state_of("ann") == "active"
        assert ann.status().useful_groups == 0
        assert bob.status().workers[0].submissions_rejected == 0


def test_a_step_that_finds_no_signal_trains_on_what_there_is(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    for useful in (0, 1, 0, 0):
        swarm.produce(ann, useful=useful)
    batch = swarm.client("trainer").batch(0, wait_s=0).batch
    assert batch is not None
    assert [group.group_id for group in batch.groups] == ["0/1/0"]
    assert batch.generated_groups == 8
    trained = [reward for group in batch.groups for reward in group.rewards]
    rows = swarm.all("SELECT rewards, task_rewards FROM groups")
    assert len(rows) == 8
    everything = [reward for row in rows for reward in json.loads(str(row["rewards"]))]
    assert batch.generated_reward_mean == pytest.approx(fmean(everything))
    assert len(everything) > len(trained)
    assert batch.generated_task_reward_mean == pytest.approx(
        fmean(reward for row in rows for reward in json.loads(str(row["task_rewards"])))
    )


@pytest.mark.parametrize("reason", [Reason.REWARD, Reason.COMMITMENT, Reason.SCHEMA])
def test_a_proof_of_cheating_bans_slashes_and_withdraws(tmp_path: Path, reason: Reason) -> None:
    with running(tmp_path, small_config(training={"groups_per_step": 4})) as swarm:
        swarm.publish(0)
        ann, eve = swarm.join("ann", "eve")
        swarm.produce(eve, useful=1)
        rejected, _ = swarm.work(eve)
        pending, pending_id = swarm.work(eve)
        leased = swarm.lease(eve)
        swarm.reject(reason)

        view = next(view for view in ann.status().workers if view.name == "eve")
        assert (view.state, view.credit_held, view.submissions_rejected) == ("banned", 0, 1)
        assert view.banned_at_s is not None
        assert str(reason) in view.reason
        entries, _ = verify_export(swarm.whole_ledger().splitlines(), keypair("coordinator").public)
        account = balances(entries)[keypair("eve").public]
        assert account == {"held": 0, "released": 0, "slashed": 2 * TOKENS_PER_GROUP}
        assert swarm.all("SELECT state FROM groups WHERE useful=1") == [{"state": "withdrawn"}]
        assert swarm.one("SELECT state FROM submissions WHERE submission_id=?", pending_id) == {"state": "void"}
        assert not swarm.all("SELECT 1 FROM leases WHERE state='leased'")

        # What eve began is done again by somebody else, what she finished counts for nothing.
        redone = [swarm.produce(ann, useful=0).slot for _ in range(3)]
        assert redone == [rejected.slot, pending.slot, leased.slot]
        swarm.produce(ann)
        swarm.produce(ann)
        batch = swarm.client("trainer").batch(0, wait_s=0).batch
        assert batch is not None
        assert {group.group_id for group in batch.groups} == {"0/4/0", "0/4/1", "0/5/0", "0/5/1"}
        assert batch.generated_groups == 10


def test_everything_survives_a_restart(tmp_path: Path) -> None:
    with running(tmp_path, small_config()) as swarm:
        swarm.publish(0)
        ann, bob = swarm.join("ann", "bob")
        swarm.produce(ann, useful=1)
        leased = swarm.lease(bob)
        swarm.work(ann)
        claim = swarm.claim()
        before = ann.status()
        clock = swarm.clock
    cut_off = tmp_path / "submissions" / "cut-off-upload.parquet"
    cut_off.write_bytes(b"half")
    os.utime(cut_off, (0, 0))  # a young one may belong to another coordinator of the same store
    clock.advance(9)
    with running(tmp_path, small_config(), clock) as swarm:
        after = swarm.client("anyone").status()
        assert after.ledger_head == before.ledger_head
        assert [view.state for view in after.workers] == [view.state for view in before.workers]
        assert (after.step, after.useful_groups) == (before.step, before.useful_groups)
        assert not cut_off.exists()
        swarm.client("bob").submit(leased.lease_id, b"made while the coordinator was away")
        assert swarm.claim().claim_id != claim.claim_id
        entries, _ = verify_export(swarm.whole_ledger().splitlines(), keypair("coordinator").public)
        assert [entry.kind for entry in entries].count("run") == 1
