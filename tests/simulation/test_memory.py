"""The coordinator in memory decides what the coordinator of a run decides: whole scenarios have the same outcome."""

from collections.abc import Callable

import pytest

from shoal.config import ShoalConfig, build_config
from shoal.coordinator.rules import retries
from shoal.simulation import (
    Behaviour,
    LocalCoordinator,
    MemoryCoordinator,
    Scenario,
    Work,
    WorkerPlan,
    attacks,
    simulate,
    unequal,
)

WORK = Work(seconds=4.0, spread=0.3)
HONEST = [WorkerPlan(f"honest-{number}") for number in range(4)]


def config(**sections: dict[str, object]) -> ShoalConfig:
    tree: dict[str, dict[str, object]] = {
        "run": {"steps": 1000},
        "rollouts": {"group_size": 2, "tasks_per_slot": 2, "max_prompt_tokens": 16, "max_new_tokens": 64},
        "training": {"async_level": 2, "groups_per_step": 8},
        "coordinator": {"lease_s": 60},
        "trust": {"stake_tokens": 100_000},
    }
    return build_config({name: tree.get(name, {}) | sections.get(name, {}) for name in {**tree, **sections}})


def assert_agreement(scenario: Scenario) -> None:
    stored, in_memory = simulate(scenario), simulate(scenario, MemoryCoordinator)
    assert in_memory == stored
    assert len(stored.formed_at) == scenario.steps


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"coordinator": {"lease_s": 60, "just_in_time": False}},
        {"training": {"async_level": 0, "groups_per_step": 6}},
        {"training": {"async_level": 4, "groups_per_step": 12}, "rollouts": {"tasks_per_slot": 1}},
        {"trust": {"probation_audits": 1, "audit_floor": 0.05, "unaudited_share": 1.0, "stake_tokens": 200_000}},
    ],
    ids=["defaults", "at-once", "synchronous", "deep", "trusting"],
)
def test_both_coordinators_agree_about_honest_swarms(sections: dict[str, dict[str, object]]) -> None:
    for train_s in (0.5, 12.0):
        plan = Scenario(config(**sections), [*HONEST, *unequal()], WORK, steps=10, train_s=train_s)
        assert_agreement(plan)


@pytest.mark.parametrize("name", sorted(attacks()))
def test_both_coordinators_agree_about_every_attack(name: str) -> None:
    hostile = [WorkerPlan(f"hostile-{number}", behaviour=attacks()[name]) for number in range(2)]
    assert_agreement(Scenario(config(), [*HONEST, *hostile], WORK, steps=6, train_s=2.0))


def test_both_coordinators_agree_when_most_keys_are_hostile() -> None:
    behaviours = [Behaviour("junk", every=3, renews=True), Behaviour("stall", every=4), Behaviour("just_late")]
    hostile = [WorkerPlan(f"hostile-{n}", behaviour=behaviour) for n, behaviour in enumerate(behaviours * 2)]
    assert_agreement(Scenario(config(), [*HONEST[:3], *hostile], WORK, steps=12, train_s=1.0, validators=1))


@pytest.mark.parametrize("make", [LocalCoordinator, MemoryCoordinator])
def test_a_claim_lasts_as_long_as_a_large_version_takes_to_read(
    make: Callable[[ShoalConfig, Callable[[], float], bytes], LocalCoordinator | MemoryCoordinator],
) -> None:
    now, version_bytes = [1000.0], 14 << 30
    settings = config(coordinator={"lease_s": 100_000, "gone_after_s": 100_000})
    coordinator = make(settings, lambda: now[0], b"1" * 32)
    coordinator.publish(0, size_bytes=version_bytes)
    coordinator.register("a" * 64, 100.0)
    lease = coordinator.lease("a" * 64, "request-00000001", [0]).lease
    assert lease is not None
    coordinator.submit("a" * 64, lease.lease_id, b"work")
    assert coordinator.claim("validator", "claim-00000001") is not None
    lasts_s = retries.claim_s(settings.validation.claim_s, version_bytes)
    assert lasts_s > settings.validation.claim_s + 60
    now[0] += lasts_s - 1
    assert coordinator.claim("validator", "claim-00000002") is None
    now[0] += 2
    assert coordinator.claim("validator", "claim-00000003") is not None
