"""The owner's hand on a run, through the real app: pause, resume, drain, ban, unban."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.coordinator.ledger import balances, verify_export
from shoal.errors import RefusedError
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.verdicts import Reason
from support.samples import keypair
from support.swarm import TOKENS_PER_GROUP, Swarm, running, small_config


def owner(swarm: Swarm) -> CoordinatorClient:
    return swarm.client("run")


def tell(swarm: Swarm, state: api.OwnerState) -> api.RunStateAnswer:
    return owner(swarm).set_run_state(api.RunStateBody(state=state))


def ban_body(name: str, reason: str = "because") -> api.BanBody:
    return api.BanBody(worker=keypair(name).public, reason=reason)


def kinds(swarm: Swarm) -> list[str]:
    entries, _ = verify_export(swarm.whole_ledger().splitlines(), keypair("coordinator").public)
    return [entry.kind for entry in entries]


def test_a_paused_run_gives_out_nothing_and_takes_in_what_was_leased(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)
    answer = tell(swarm, "paused")
    assert (answer.run_state, answer.leases_outstanding) == ("paused", 1)
    assert swarm.ask(ann, 0).reason == "paused"
    ann.submit(lease.lease_id, b"rollouts")
    swarm.accept()
    assert swarm.client("trainer").batch(0, wait_s=0).batch is not None
    swarm.publish(1)
    assert ann.status().run_state == "paused"
    assert "the run is paused" in swarm.client("trainer").batch(1, wait_s=0).waiting_for
    assert tell(swarm, "running").run_state == "running"
    assert swarm.ask(ann, 1).lease is not None


def test_a_draining_run_is_drained_when_nothing_is_leased_unverified_or_untrained(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    trainer = swarm.client("trainer")
    lease = swarm.lease(ann)
    assert tell(swarm, "draining").run_state == "draining"
    assert swarm.ask(ann, 0).reason == "draining"
    ann.submit(lease.lease_id, b"rollouts")
    answer = tell(swarm, "draining")
    assert (answer.run_state, answer.leases_outstanding, answer.submissions_pending) == ("draining", 0, 1)
    swarm.accept()
    assert trainer.batch(0, wait_s=0).batch is not None
    assert ann.status().run_state == "draining"
    swarm.publish(1)
    assert ann.status().run_state == "drained"
    assert trainer.batch(1, wait_s=0).run_state == "drained"
    assert swarm.ask(ann, 1).reason == "draining"
    assert tell(swarm, "running").run_state == "running"
    assert trainer.batch(1, wait_s=0).run_state == "running"


def test_the_state_survives_a_restart_and_is_recorded_in_the_ledger_once(tmp_path: Path) -> None:
    with running(tmp_path, small_config()) as swarm:
        swarm.publish(0)
        tell(swarm, "paused")
        tell(swarm, "paused")
        assert kinds(swarm).count("run_state") == 1
        clock = swarm.clock
    with running(tmp_path, small_config(), clock) as swarm:
        (ann,) = swarm.join("ann")
        assert swarm.ask(ann, 0).reason == "paused"
        tell(swarm, "running")
        assert kinds(swarm).count("run_state") == 2


def test_a_finished_run_cannot_be_paused(tmp_path: Path) -> None:
    with running(tmp_path, small_config(run={"steps": 1})) as swarm:
        swarm.publish(0)
        (ann,) = swarm.join("ann")
        swarm.produce(ann)
        swarm.publish(1)
        with pytest.raises(RefusedError, match="finished"):
            tell(swarm, "paused")


@pytest.mark.parametrize("name", ["ann", "trainer", "validator", "coordinator", "stranger"])
def test_only_the_run_key_commands(swarm: Swarm, name: str) -> None:
    swarm.join("ann", "bob")
    before = swarm.whole_ledger()
    client = swarm.client(name)
    calls: list[Callable[[], object]] = [
        lambda: client.set_run_state(api.RunStateBody(state="paused")),
        lambda: client.ban(ban_body("bob")),
        lambda: client.unban(ban_body("bob")),
    ]
    for call in calls:
        with pytest.raises(RefusedError) as refused:
            call()
        assert (refused.value.code, refused.value.status) == ("owner", 403)
    assert swarm.state_of("bob") == "registered"
    assert swarm.whole_ledger() == before


def test_an_owners_ban_slashes_withdraws_and_is_recorded_with_its_reason(tmp_path: Path) -> None:
    with running(tmp_path, small_config(training={"groups_per_step": 4})) as swarm:
        swarm.publish(0)
        ann, eve = swarm.join("ann", "eve")
        swarm.produce(eve, useful=1)
        leased = swarm.lease(eve)
        view = owner(swarm).ban(ban_body("eve", "copied from a friend"))
        assert (view.state, view.reason, view.credit_held) == ("banned", "by the owner: copied from a friend", 0)
        assert swarm.all("SELECT state FROM groups WHERE useful=1") == [{"state": "withdrawn"}]
        assert swarm.lease(ann).slot == leased.slot
        with pytest.raises(RefusedError, match="copied from a friend"):
            swarm.ask(eve, 0)
        entries, _ = verify_export(swarm.whole_ledger().splitlines(), keypair("coordinator").public)
        assert any(entry.kind == "ban" and "copied from a friend" in entry.body for entry in entries)
        assert balances(entries)[keypair("eve").public]["slashed"] == 2 * TOKENS_PER_GROUP
        owner(swarm).ban(ban_body("eve", "again"))
        assert kinds(swarm).count("ban") == 1


def test_a_lifted_ban_leads_back_to_probation_with_an_empty_record(swarm: Swarm) -> None:
    swarm.publish(0)
    (eve,) = swarm.join("eve")
    swarm.produce(eve)
    swarm.publish(1)
    swarm.work(eve, 1)
    swarm.reject(Reason.REWARD)
    swarm.write(lambda connection: connection.execute("UPDATE workers SET drift=13.5"))
    assert swarm.state_of("eve") == "banned"
    view = owner(swarm).unban(ban_body("eve", "the verifier was wrong"))
    assert (view.state, view.reason, view.banned_at_s) == ("probation", "", None)
    assert swarm.one("SELECT drift, clean_audits, anomalies FROM workers") == {
        "drift": 0,
        "clean_audits": 0,
        "anomalies": 0,
    }
    assert kinds(swarm)[-1] == "unban"
    assert eve.history().bans == []
    assert swarm.ask(eve, 1).lease is not None


def test_only_a_banned_key_can_be_unbanned_and_only_a_known_one_banned(swarm: Swarm) -> None:
    swarm.join("ann")
    with pytest.raises(RefusedError, match="registered, not banned"):
        owner(swarm).unban(ban_body("ann"))
    with pytest.raises(RefusedError) as refused:
        owner(swarm).ban(ban_body("nobody"))
    assert (refused.value.code, refused.value.status) == ("unknown_worker", 404)


@pytest.mark.parametrize("reason", ["", "two\nlines", "x" * 201])
def test_a_ban_without_a_readable_reason_cannot_be_said(reason: str) -> None:
    with pytest.raises(ValueError, match="reason"):
        ban_body("ann", reason)
