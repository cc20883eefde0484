"""Whole swarms with backups, late files, expired choices and bans: the books repeat what the coordinator booked, entry by entry."""

import json
from collections import Counter

import pytest

from shoal.config import build_config
from shoal.coordinator import ledger
from shoal.coordinator.ledger.verification import Verification, verify_ledger
from shoal.simulation import Behaviour, Scenario, Work, WorkerPlan, simulate
from shoal.simulation.coordinator import LocalCoordinator

CONFIG = build_config(
    {
        "run": {"steps": 1000},
        "rollouts": {"group_size": 2, "tasks_per_slot": 2, "max_prompt_tokens": 16, "max_new_tokens": 4096},
        "training": {"async_level": 2, "groups_per_step": 8},
        "coordinator": {"lease_s": 60},
        "trust": {"stake_tokens": 100_000},
    }
)
UNSIGNED = "the worker did not sign this file"
"""Nobody but the scenario sends files there, so they are not signed."""
HOSTILE = [
    Behaviour("return_late", after=5),
    Behaviour("junk"),
    Behaviour("just_in_time"),
    Behaviour("just_late", when_reliable=True),
    Behaviour("stall", renews=True),
]
results: list[tuple[Verification, Counter[str]]] = []


def verify_at_the_end(self: LocalCoordinator) -> None:
    extent = ledger.whole(self.connection)
    lines = ledger.page(self.connection, 0, extent.entries)
    bodies = [json.loads(json.loads(line)["body"]) for line in lines if json.loads(line)["kind"] == "verdict"]
    seal = ledger.seal(self.run.keypair, "simulation", extent, self.run.clock())
    result = verify_ledger([*lines, seal], self.run.keypair.public, run_key=self.run.keypair.public)
    results.append((result, Counter(body["use"] for body in bodies)))
    self.connection.close()


@pytest.mark.parametrize("behaviour", HOSTILE, ids=lambda one: str(one.attack))
def test_the_ledger_of_a_swarm_under_attack_holds(behaviour: Behaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalCoordinator, "close", verify_at_the_end)
    results.clear()
    workers = [
        *(WorkerPlan(f"honest-{number}") for number in range(6)),
        *(WorkerPlan(f"hostile-{number}", behaviour=behaviour) for number in range(2)),
        WorkerPlan("slow", speed=0.15),
    ]
    simulate(Scenario(config=CONFIG, workers=workers, work=Work(seconds=4.0, spread=0.2), steps=20))
    ((result, uses),) = results
    assert [finding for finding in result.findings if finding.text != UNSIGNED] == []
    assert result.verdicts == sum(uses.values()) > 100
    assert uses["counts"] > 100
