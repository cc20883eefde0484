"""Small deviations add up to a ban, honest rounding does not, and good work buys nothing."""

import json
import math
import random

import pytest
from pydantic import ValidationError

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
    rng, sums = random.Random(seed), drift.Sums()
    for _ in range(head_start):
        sums = drift.after(sums, [evidence(rng, 1.0), -1.0])
    for audit in range(1, limit + 1):
        sums = drift.after(sums, [evidence(rng, coarseness), -1.0])
        if drift.level(drift.total(sums)) == "cheating":
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
    swarm.accept(useful=0, metrics=AuditMetrics(tokens=1000, drift_llrs=[amount]), audited_groups=[0, 1])


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


def test_the_mean_of_the_ratios_decides() -> None:
    assert drift.total(()) == 0.0
    assert drift.total((0.0, 0.0, 0.0)) == 0.0
    assert drift.total((20.0, 0.0)) == pytest.approx(20.0 - math.log(2))
    assert drift.total((5000.0, 0.0, 4000.0)) == pytest.approx(5000.0 - math.log(3))


def test_an_alternative_that_validators_begin_to_report_starts_at_zero() -> None:
    assert drift.after((), [2.0, -1.0]) == (2.0, 0.0)
    assert drift.after((2.0, 0.0), [1.0]) == (3.0, 0.0)
    assert drift.after((2.0,), [1.0, 4.0]) == (3.0, 4.0)


def test_parts_of_the_sum_are_kept_between_audits(swarm: Swarm) -> None:
    swarm.publish(0)
    swarm.join("ann")
    for first, second in ((2.0, 3.0), (-5.0, 1.0)):
        swarm.work(swarm.client("ann"))
        swarm.accept(useful=0, metrics=AuditMetrics(tokens=10, drift_llrs=[first, second]), audited_groups=[0, 1])
    row = swarm.one("SELECT drift, drift_sums FROM workers")
    assert json.loads(str(row["drift_sums"])) == [0.0, 4.0]
    assert row["drift"] == pytest.approx(math.log((1 + math.exp(4.0)) / 2))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_evidence_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValidationError):
        AuditMetrics(drift_llrs=[value])
