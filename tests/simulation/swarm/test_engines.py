"""An engine is found again from the leases and files that it leaves behind."""

import random

import pytest

from shoal.simulation.swarm.engines import Work, _ends, engine_alone, fitted_engine, replayed_engine

SAMPLES = 16


def made(rows: int, token_s: float, deliver_s: float, *, gap_s: float, jitter_s: float = 0.0) -> list[Work]:
    """Thirty slots whose leases come `gap_s` after each other; a version lasts for ten of them."""
    chance = random.Random(3)
    lengths = [[round(chance.lognormvariate(3.0, 0.5)) + 1 for _ in range(SAMPLES)] for _ in range(30)]
    leased = [Work(100 + gap_s * number, 0.0, number // 10, one) for number, one in enumerate(lengths)]
    ends = _ends(leased, rows, token_s)
    return [
        Work(one.issued_at, end + deliver_s + chance.uniform(0, jitter_s), one.version, one.lengths)
        for one, end in zip(leased, ends, strict=True)
    ]


@pytest.mark.parametrize("rows", [4, 8, 32])
@pytest.mark.parametrize("gap_s", [9.0, 1.5], ids=["one-at-a-time", "overlapping"])
@pytest.mark.parametrize("deliver_s", [0.0, 0.6])
def test_speed_and_delivery_are_separated(rows: int, gap_s: float, deliver_s: float) -> None:
    found = replayed_engine(made(rows, 0.04, deliver_s, gap_s=gap_s, jitter_s=0.1))
    assert found is not None
    assert found.deliver_s == pytest.approx(deliver_s, abs=0.2)
    shown = min(rows, SAMPLES) if gap_s == 9.0 else rows  # more rows than samples at once leave no trace
    assert found.rows / found.tokens_per_s == pytest.approx(0.04, rel=0.1)
    assert shown / 2 <= found.rows <= 2 * rows


def test_slots_of_equal_length_are_the_engines() -> None:
    """Nothing tells a slow engine from a slow delivery here; the simpler answer is the engine."""
    work = [Work(10.0 * number, 10.0 * number + 2.0, 0, [20] * SAMPLES) for number in range(20)]
    found = replayed_engine(work)
    assert found is not None
    assert found.deliver_s == pytest.approx(0.0, abs=0.1)


def test_too_few_files_give_no_engine() -> None:
    assert replayed_engine(made(8, 0.04, 0.1, gap_s=5.0)[:5]) is None


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_an_engine_is_found_from_its_speed_and_the_time_of_a_slot(rows: int) -> None:
    lengths = [50, 80, 100, 120, 200, 400]
    speed, slot_s = engine_alone(lengths, SAMPLES, rows, 1000.0)
    found = fitted_engine(lengths, SAMPLES, speed, slot_s)
    assert found.tokens_per_s == pytest.approx(1000.0, rel=0.1)
    assert rows / 2 <= found.rows <= 2 * rows
