"""Idle workers are parked and answered in a loop: no number of a swarm may show it."""

import gc
import json
import random
from typing import Any

import pytest

from shoal.simulation.memory.coordinator import MemoryCoordinator
from shoal.simulation.memory.leasing import Leasing
from shoal.simulation.memory.refusals import Refusals
from shoal.simulation.swarm.driver import Swarm
from shoal.simulation.swarm.idle import Idle
from shoal.simulation.swarm.spec import SwarmSpec, build_scenario
from simulation.swarm.small import tree

CHURN = {"stays_s": 120.0, "away_s": 60.0}
FORGERS = {"name": "forger", "count": 3, "tokens_per_s": 200, "rows": 8, "conduct": "forge"}
OTHERS = [
    {"name": "staller", "count": 2, "tokens_per_s": 200, "conduct": "stall"},
    {"name": "breaker", "count": 2, "tokens_per_s": 200, "conduct": "junk"},
    {"name": "snail", "count": 2, "tokens_per_s": 9, "rows": 2, "down_mbit_s": 8.0},
]


def crowd(**changes: Any) -> SwarmSpec:
    """More workers than work, some of them hostile or gone: most requests are refused."""
    sections: dict[str, Any] = {"run": {"steps": 6}, "workers": CHURN | {"count": 24, "speed_spread": 0.4}}
    found = tree(**(sections | changes))
    found["workers"] += [FORGERS, *OTHERS]
    return build_scenario(found)


def numbers(swarm: Swarm) -> str:
    return json.dumps(swarm.run().to_json())


SWARMS: dict[str, dict[str, Any]] = {
    "usual": {},
    "leases-at-once": {"settings": {"coordinator": {"just_in_time": False}}},
    "busy-coordinator": {"coordinator": {"requests_per_s": 30.0}},
    "coordinator-without-limit": {"coordinator": {"requests_per_s": 0}},
    "no-backups": {"coordinator": {"backups": False}},
    "hungry-trainer": {"trainer": {"step_s": 1.0}, "settings": {"training": {"groups_per_step": 32}}},
    "slot-by-slot": {"workers": {"continuous": False, "count": 12}, "weights": {"delta_bytes": 0.0}},
    "small-shares": {"settings": {"trust": {"key_share": 0.1, "probation_share": 0.05, "probation_audits": 3}}},
    "thin-links": {"origin": {"up_mbit_s": 20.0}},
}


@pytest.mark.parametrize("changes", SWARMS.values(), ids=SWARMS.keys())
def test_parked_workers_change_no_number(changes: dict[str, Any]) -> None:
    built = crowd(**changes)
    assert numbers(Swarm(built)) == numbers(Swarm(built, parks=False))


@pytest.mark.parametrize("name", ["usual", "leases-at-once", "busy-coordinator"])
def test_no_number_shows_that_answers_are_repeated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every request decided by the rule for its own key, the swarm is the same."""
    built = crowd(**SWARMS[name])
    quick = numbers(Swarm(built))
    monkeypatch.setattr(Refusals, "get", lambda *_: None)
    assert numbers(Swarm(built, parks=False)) == quick
    assert json.loads(quick)["is_finished"]


def test_most_requests_are_answered_without_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    decided, decide = list[str](), MemoryCoordinator.lease

    def lease(self: MemoryCoordinator, key: str, *request: Any) -> Any:
        decided.append(key)
        return decide(self, key, *request)

    monkeypatch.setattr(MemoryCoordinator, "lease", lease)
    swarm = Swarm(crowd(trainer={"step_s": 60.0}))
    swarm.run()
    assert swarm.world.counted.requests > 10_000
    assert len(decided) < 0.2 * swarm.world.counted.requests


def test_waits_of_all_lengths_are_parked_and_come_up_in_the_order_of_time() -> None:
    """Falling times fit in no line: a line is in the order of time."""
    swarm, asked = Swarm(crowd()), list[tuple[float, int]]()
    clock, chance = swarm.world.clock, random.Random(3)
    times = [clock.now + chance.choice([0.5, 1.0, chance.random() * 40]) for _ in range(len(swarm.members))]
    idle = Idle(swarm.world, swarm.world.coordinator)  # type: ignore[arg-type]
    for number, (member, at) in enumerate(zip(swarm.members, times, strict=True)):
        member.ask = lambda _, number=number: asked.append((clock.now, number))  # type: ignore[method-assign, misc]
        idle.park(member, at)
    while idle.play(None, clock.now + 1e9, 1e9):
        pass
    assert asked == sorted((at, number) for number, at in enumerate(times))


def test_steps_that_are_over_leave_nothing_for_a_search_of_circles() -> None:
    """A search in the memory of ten thousand workers takes seconds, so none is made in a long while."""
    found = list[int]()
    built = crowd(run={"steps": 30}, settings={"coordinator": {"lease_s": 60}})
    Swarm(built).run(lambda _: found.append(gc.collect()))
    assert len(found) == 30
    assert sum(found) < 100


def test_a_loop_of_answers_keeps_to_the_number_of_events_and_the_time() -> None:
    """A standstill counts events, so that the loop must stop at the same one."""
    for most, longest_s in ((500, 1e9), (501, 1e9), (10**9, 7.3), (10**9, 40.0)):
        ends = []
        for parks in (True, False):
            swarm = Swarm(crowd(), parks=parks)
            runs = [swarm.world.clock.run(lambda: False, longest_s, most) for _ in range(3)]
            ends.append((runs, swarm.world.clock.now, swarm.world.counted.requests))
        assert ends[0] == ends[1]


def test_a_repeated_refusal_is_what_the_rule_says_of_this_very_key(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, repeated = list[str](), Leasing.common_refusal

    def checked(self: Leasing, key: Any, held_versions: tuple[int, ...], now: float) -> Any:
        found = repeated(self, key, held_versions, now)
        if found is not None:
            with monkeypatch.context() as patch:
                patch.setattr(Refusals, "get", lambda *_: None)
                answer = self.decide(key, held_versions)
            assert (answer.reason, answer.wanted_version) == (found.reason, found.wanted_version)  # type: ignore[union-attr]
            compared.append(found.reason)
        return found

    monkeypatch.setattr(Leasing, "common_refusal", checked)
    Swarm(crowd(trainer={"step_s": 40.0})).run()
    assert set(compared) >= {"no_work", "need_weights", "waiting_for_trainer"}
