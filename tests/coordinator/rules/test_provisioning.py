from dataclasses import replace

import pytest

from shoal.coordinator.rules.provisioning import Rates, provision, workers_needed

BALANCED = Rates(
    groups_per_step=100, step_s=50.0, trainer_wait_s=0.0, groups_per_worker_s=0.5, workers=5, workers_waiting=0
)


def test_workers_keep_the_trainer_busy_with_a_margin() -> None:
    assert workers_needed(BALANCED) == 5  # 100 groups in 50 s are 2 per second, 4 workers, a tenth more
    assert workers_needed(replace(BALANCED, trainer_wait_s=25.0)) == 9


@pytest.mark.parametrize("missing", ["groups_per_step", "step_s", "groups_per_worker_s"])
def test_an_unknown_rate_gives_no_number(missing: str) -> None:
    assert workers_needed(replace(BALANCED, **{missing: 0.0})) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "side", "words"),
    [
        ({}, "none", "Nobody waits for long: the trainer needs 5 workers of this speed, has 5."),
        ({"trainer_wait_s": 25.0}, "trainer", "needs 9 workers of this speed, has 5. Add 4 workers."),
        ({"trainer_wait_s": 10.0, "workers": 20}, "trainer", "look for late slots"),
        ({"workers_waiting": 4}, "workers", "Workers wait for work"),
        ({"workers_fetching": 4}, "weights", "add a relay"),
        ({"validators_lag_s": 60.0}, "validators", "add a validator"),
        ({"step_s": 0.0}, "unknown", "Not known yet"),
    ],
)
def test_the_side_that_starves_is_named_with_what_to_add(change: dict[str, float], side: str, words: str) -> None:
    found = provision(replace(BALANCED, **change))  # type: ignore[arg-type]
    assert found.side == side
    assert words in found.sentence


def test_one_worker_is_one_worker() -> None:
    rates = replace(BALANCED, groups_per_worker_s=3.0, workers=1)
    assert "needs 1 worker of this speed, has 1" in provision(rates).sentence
