"""Keys are free: what a flood of them costs the others, the store and the ledger."""

from pathlib import Path

import pytest

from shoal.coordinator import housekeeping
from shoal.coordinator.http.service import NEW_KEYS_AT_ONCE
from shoal.errors import RefusedError, UnavailableError
from support.samples import keypair
from support.swarm import HEARTBEAT, Swarm, ledger_kinds, registration, running, small_config

FLOOD = 2000


def flood(swarm: Swarm) -> int:
    """How many of many keys of one address are registered."""
    accepted = 0
    for number in range(FLOOD):
        try:
            swarm.client(f"flood-{number}", deadline_s=0.0).register(registration("flood"))
            accepted += 1
        except UnavailableError:
            pass
    return accepted


def test_one_address_registers_a_few_keys_and_nobody_else_waits_longer_for_it(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.produce(ann)
    before = swarm.ask(ann).retry_after_s
    swarm.app.service.address_limit._per_s = 0.0
    assert flood(swarm) == NEW_KEYS_AT_ONCE - 1
    for number in range(NEW_KEYS_AT_ONCE - 1):
        swarm.ask(swarm.client(f"flood-{number}"), 0)
    assert swarm.ask(ann).retry_after_s <= before
    assert ann.heartbeat(HEARTBEAT).worker.submissions_accepted == 1


def test_a_known_key_may_register_again_however_many_its_address_has(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    while swarm.app.service.new_keys.wait_s("testclient") == 0:
        pass
    with pytest.raises(UnavailableError, match="registers too many keys"):
        swarm.client("bob").register(registration("bob"))
    assert ann.register(registration("ann", tokens_per_s=7.0)).tokens_per_s == 7.0
    swarm.clock.advance(10)
    assert swarm.client("bob").register(registration("bob")).name == "bob"


def test_a_key_enters_the_ledger_with_its_first_accepted_work(swarm: Swarm) -> None:
    swarm.publish(0)
    before = ledger_kinds(swarm)
    ann, bob = swarm.join("ann", "bob")
    bob.heartbeat(HEARTBEAT)
    ann.heartbeat(HEARTBEAT)
    swarm.work(ann)
    assert ledger_kinds(swarm) == before
    assert keypair("ann").public not in swarm.run.presence.proven
    swarm.accept()
    assert [kind for kind in ledger_kinds(swarm) if kind == "registered"] == ["registered"]
    assert ledger_kinds(swarm)[len(before)] == "registered"
    assert swarm.run.presence.proven == {keypair("ann").public}
    swarm.publish(1)
    swarm.produce(ann)
    assert ledger_kinds(swarm).count("registered") == 1


def test_budgets_of_keys_with_accepted_work_outlive_a_restart_and_end_with_a_ban(tmp_path: Path) -> None:
    with running(tmp_path, small_config()) as swarm:
        swarm.publish(0)
        (ann, _) = swarm.join("ann", "bob")
        swarm.produce(ann)
        clock = swarm.clock
    with running(tmp_path, small_config(), clock) as swarm:
        key = keypair("ann").public
        assert swarm.run.presence.proven == {key}
        swarm.run.presence.forget_banned(key)
        assert not swarm.app.service.gate.is_proven(key)
        assert swarm.app.service.gate.is_proven(keypair("trainer").public)


def test_keys_that_never_worked_are_forgotten_after_a_day(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, _, cem = swarm.join("ann", "bob", "cem")
    swarm.lease(ann)
    swarm.clock.advance(housekeeping.STRANGERS_KEPT_S + 1)
    cem.heartbeat(HEARTBEAT)
    swarm.sweep()
    assert swarm.write(lambda connection: housekeeping.forget_strangers(connection, swarm.run)) == 1
    assert {row["name"] for row in swarm.all("SELECT name FROM workers")} == {"ann", "cem"}
    with pytest.raises(RefusedError, match="not registered"):
        swarm.client("bob").heartbeat(HEARTBEAT)
    assert swarm.client("bob").register(registration("bob")).state == "registered"
