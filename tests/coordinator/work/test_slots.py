"""Tallies are numbers that nobody recounts in a request; here they are recounted."""

import contextlib
import random
from pathlib import Path

from shoal.errors import RefusedError
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.verdicts import Reason
from support.swarm import Swarm, running, small_config


def assert_tallies_are_true(swarm: Swarm) -> None:
    kept = {(row["step"], row["name"]): row["n"] for row in swarm.all("SELECT * FROM tallies WHERE n <> 0")}
    counted = {
        (row["step"], f"deferred {row['state']}" if row["deferred"] else row["state"]): row["n"]
        for row in swarm.all("SELECT step, state, deferred, COUNT(*) AS n FROM slots GROUP BY step, state, deferred")
    }
    probation = swarm.all(
        "SELECT step, COUNT(*) AS n FROM leases WHERE by_active_key=0 AND state IN ('leased','submitted') GROUP BY step"
    )
    assert kept == counted | {(row["step"], "probation"): row["n"] for row in probation}
    names = "step, policy_version, deferred"
    waiting = f"SELECT {names}, n FROM waiting WHERE n <> 0 ORDER BY {names}"
    groups = f"SELECT {names}, COUNT(*) AS n FROM groups WHERE state='accepted' GROUP BY {names} ORDER BY {names}"
    assert swarm.all(waiting) == swarm.all(groups)


def test_tallies_stay_true_whatever_happens(tmp_path: Path) -> None:
    chance = random.Random(7)
    config = small_config(run={"steps": 50}, training={"groups_per_step": 5, "async_level": 1})
    formed = 0
    with running(tmp_path, config) as swarm:
        swarm.publish(0)
        clients = swarm.join(*(f"worker-{number}" for number in range(12)))
        for _ in range(120):
            _something_happens(swarm, clients, chance)
            newest = swarm.one("SELECT MAX(step) AS step FROM batches")["step"]
            while isinstance(newest, int) and newest + 1 > formed:
                formed += 1
                swarm.publish(formed)
        assert_tallies_are_true(swarm)
        states = {row["state"] for row in swarm.all("SELECT DISTINCT state FROM leases")}
        groups = {row["state"] for row in swarm.all("SELECT DISTINCT state FROM groups")}
    assert formed >= 3
    assert {"submitted", "returned", "expired"} <= states, states
    assert "consumed" in groups


def test_what_a_banned_key_held_leaves_the_tallies(tmp_path: Path) -> None:
    with running(tmp_path, small_config(training={"groups_per_step": 8})) as swarm:
        swarm.publish(0)
        (eve,) = swarm.join("eve")
        swarm.produce(eve)
        swarm.work(eve)
        swarm.lease(eve)
        assert_tallies_are_true(swarm)
        swarm.reject(Reason.REWARD)
        assert_tallies_are_true(swarm)
        assert {row["state"] for row in swarm.all("SELECT state FROM leases WHERE slot <> 1")} == {"void"}
        assert swarm.all("SELECT n FROM tallies WHERE name='probation'") == [{"n": 1}]


def _something_happens(swarm: Swarm, clients: list[CoordinatorClient], chance: random.Random) -> None:
    worker = chance.choice(clients)
    with contextlib.suppress(RefusedError):  # a banned key is refused
        if lease := swarm.ask(worker, *range(50)).lease:
            if chance.random() < 0.15:
                worker.give_back(lease.lease_id)
            elif chance.random() < 0.9:
                worker.submit(lease.lease_id, lease.lease_id.encode())
    for _ in range(chance.randrange(3)):
        answer = swarm.client("validator").claim(api.ClaimBody(request_id=swarm.new_id(), wait_s=0))
        if answer.claim is None:
            break
        outcome = chance.random()
        if outcome < 0.8:
            swarm.accept(answer.claim, useful=chance.randrange(3))
        else:
            reasons = [Reason.REWARD, Reason.LOGPROBS, Reason.VALIDATOR_CRASH]
            swarm.reject(chance.choices(reasons, [1, 1, 1])[0], claim=answer.claim)
    swarm.clock.advance(chance.uniform(0, 5))
    swarm.sweep()
