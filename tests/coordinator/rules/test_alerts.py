"""Each alert of the table is driven over its threshold and back, and a healthy run raises none."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from shoal.coordinator.rules.alerts import ALERTS, CHECKS, HeldoutReading, Readings, StepReading, check

STEPS = 32


def steps(**curves: Sequence[float]) -> list[StepReading]:
    return [StepReading(step, **{name: values[step] for name, values in curves.items()}) for step in range(STEPS)]


def rising(start: float, end: float) -> list[float]:
    return [start] * (STEPS - 8) + [end] * 8


HEALTHY = Readings(
    steps=steps(
        reward=[step / STEPS for step in range(STEPS)],
        entropy=[1.0 - step / 64 for step in range(STEPS)],
        divergence=[0.01] * STEPS,
        truncation=[0.05] * STEPS,
        repetition=[0.01] * STEPS,
        audited=[0.1] * STEPS,
    ),
    heldout=[HeldoutReading(version, 0.2 + 0.02 * version, 0.03) for version in range(0, STEPS, 4)],
    newest_version=31,
    version_age_s=5.0,
    version_users=3,
    workers=3,
    disk_free_bytes=100 << 30,
    disk_needed_bytes=256 << 20,
)
RAISED: dict[str, Readings] = {
    "divergence": replace(HEALTHY, steps=steps(divergence=rising(0.01, 0.11))),
    "divergence_unseen": replace(HEALTHY, steps=steps(audited=rising(0.1, 0.0))),
    "entropy_collapse": replace(HEALTHY, steps=steps(entropy=rising(1.0, 0.09))),
    "truncation_rising": replace(HEALTHY, steps=steps(truncation=rising(0.05, 0.16))),
    "repetition_rising": replace(HEALTHY, steps=steps(repetition=rising(0.0, 0.11))),
    "reward_without_heldout": replace(HEALTHY, heldout=[HeldoutReading(v, 0.4, 0.03) for v in range(0, STEPS, 4)]),
    "version_unused": replace(HEALTHY, version_users=0, version_age_s=181.0, version_grace_s=60.0),
    "no_validator": replace(HEALTHY, oldest_pending_s=61.0, claimed_lately=False),
    "disk_low": replace(HEALTHY, disk_free_bytes=(1 << 30) - 1),
}
NOT_RAISED: dict[str, Readings] = {
    "divergence": replace(HEALTHY, steps=steps(divergence=[0.01] * (STEPS - 1) + [9.0])),
    "divergence_unseen": replace(HEALTHY, steps=steps(audited=[0.0] * (STEPS - 4) + [0.01] + [0.0] * 3)),
    "entropy_collapse": replace(HEALTHY, steps=steps(entropy=rising(1.0, 0.11))),
    "truncation_rising": replace(HEALTHY, steps=steps(truncation=rising(0.05, 0.14))),
    "repetition_rising": replace(HEALTHY, steps=steps(repetition=rising(0.2, 0.29))),
    "reward_without_heldout": replace(HEALTHY, heldout=HEALTHY.heldout[:1]),
    "version_unused": replace(RAISED["version_unused"], is_running=False),
    "no_validator": replace(RAISED["no_validator"], claimed_lately=True),
    "disk_low": replace(HEALTHY, disk_free_bytes=None),
}


def names(readings: Readings) -> list[str]:
    return [raised.alert.name for raised in check(readings)]


def test_a_healthy_run_raises_nothing() -> None:
    assert names(HEALTHY) == []
    assert names(Readings()) == []


def test_the_table_the_checks_and_this_test_have_the_same_alerts() -> None:
    assert [alert.name for alert in ALERTS] == list(CHECKS) == list(RAISED) == list(NOT_RAISED)


@pytest.mark.parametrize("name", RAISED)
def test_an_alert_is_raised_alone_and_says_what_to_do(name: str) -> None:
    (raised,) = check(RAISED[name])
    assert raised.alert.name == name
    assert raised.seen
    assert raised.alert.advice.endswith(".")


@pytest.mark.parametrize("name", NOT_RAISED)
def test_below_its_threshold_an_alert_is_silent(name: str) -> None:
    assert name not in names(NOT_RAISED[name])
