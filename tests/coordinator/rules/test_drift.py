"""Small deviations add up to a ban, honest rounding does not, and good work buys nothing."""

import random

from shoal.coordinator.rules import drift
from shoal.protocol.api import AuditMetrics
from support.samples import keypair
from support.swarm import Swarm


def poisson(rng: random.Random, mean: float) -> int:
    count, left = 0, rng.expovariate(1.0)
    while left < mean:
        count, left = count + 1, left + rng.expovariate(1.0)
    return count


def evidence(rng: random.Random, coarseness: float, *, expected: float = 2.0, tested: float = 1.5) -> float:
    """One audit of a worker whose rate and mean of lost margins are `coarseness` times the honest ones."""
    total = sum(rng.expovariate(1 / coarseness) for _ in range(poisson(rng, coarseness * expected)))
    return (1 - 1 / tested) * total - (tested - 1) * expected


def audits_until_ban(coarseness: float, seed: int, *, limit: int, head_start: int = 0) -> int | None:
    rng, total = random.Random(seed), 0.0
    for _ in range(head_start):
        total = drift.after(total, evidence(rng, 1.0))
    for audit in range(1, limit + 1):
        total = drift.after(total, evidence(rng, coarseness))
        if drift.level(total) == "cheating":
            return audit
    return None


def test_honest_workers_are_not_banned_in_thousands_of_audits() -> None:
    assert [audits_until_ban(1.0, seed, limit=2000) for seed in range(10)] == [None] * 10


def test_coarser_numerics_are_banned_with_volume() -> None:
    assert all(audits_until_ban(1.5, seed, limit=200) for seed in range(10))
    assert all(audits_until_ban(3.0, seed, limit=12) for seed in range(10))


def test_a_long_honest_record_buys_no_credit() -> None:
    assert all(audits_until_ban(3.0, seed, limit=12, head_start=500) for seed in range(5))


def audit(swarm: Swarm, amount: float) -> None:
    (ann,) = [swarm.client("ann")]
    swarm.work(ann)
    swarm.accept(useful=0, metrics=AuditMetrics(tokens=1000, drift_llr=amount), audited_groups=[0, 1])


def test_audits_that_each_pass_ban_a_key_together(swarm: Swarm) -> None:
    swarm.publish(0)
    swarm.join("ann")
    audit(swarm, 5.0)
    assert swarm.state_of("ann") == "probation"
    audit(swarm, 5.0)
    assert swarm.state_of("ann") == "suspect"
    audit(swarm, 5.0)
    row = swarm.one("SELECT state, reason, credit_held FROM workers WHERE key=?", keypair("ann").public)
    assert (row["state"], row["credit_held"]) == ("banned", 0)
    assert str(row["reason"]).startswith("sampling_drift: ")


def test_evidence_for_honest_work_never_counts_below_zero(swarm: Swarm) -> None:
    swarm.publish(0)
    swarm.join("ann")
    audit(swarm, -50.0)
    audit(swarm, 6.0)
    assert swarm.one("SELECT drift FROM workers") == {"drift": 6.0}
