"""Commitments that lie among honest ones are no evidence; those that lie beyond add up, and no distribution is assumed."""

import math
import random

import pytest

from shoal.proofs.commitments import ChunkDifference
from shoal.validation import ranks


def honest(count: int, seed: int, factor: float = 1.0) -> list[float]:
    """Skewed, as measured ones are."""
    rng = random.Random(seed)
    return [factor * rng.lognormvariate(0.0, 0.3) for _ in range(count)]


def evidence(distances: list[float], ladder: list[ranks.Ladder], tokens: int = 32) -> float:
    return ranks.evidence(distances, [tokens] * len(distances), ladder)


LADDERS = ranks.ladders(honest(500, 0), [32] * 500)


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_honest_chunks_have_an_expected_ratio_of_at_most_one(factor: float) -> None:
    ratios = [math.exp(evidence([one], LADDERS)) for one in honest(20_000, 1, factor)]
    assert sum(ratios) / len(ratios) <= 1.0


def test_without_room_the_expectation_is_still_at_most_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "WIDER", 1.0)
    monkeypatch.setattr(ranks, "LEAST_DISTANCE", 0.0)
    means = []
    for seed in range(30):
        exact = ranks.ladders(honest(300, 100 + seed), [32] * 300)
        ratios = [math.exp(evidence([one], exact)) for one in honest(2000, 500 + seed)]
        means.append(sum(ratios) / len(ratios))
    assert 0.7 < sum(means) / len(means) <= 1.0


def test_chunks_twice_as_far_away_add_up() -> None:
    assert evidence(honest(20, 2, 2.5), LADDERS) > 14
    assert evidence(honest(200, 3), LADDERS) < -50


def test_one_chunk_counts_no_more_than_its_calibration_allows() -> None:
    most = (0.5 * int(math.log2(501)) - 1) * math.log(2)
    for far in (1e3, 1e300, math.inf):
        assert evidence([far], LADDERS) == pytest.approx(most)


def test_lengths_that_were_not_measured_say_nothing() -> None:
    assert evidence(honest(50, 4, 9.0), LADDERS, tokens=31) == 0.0
    assert evidence(honest(50, 4, 9.0), [], tokens=32) == 0.0
    few = ranks.ladders(honest(ranks.LEAST_CHUNKS - 1, 5), [7] * (ranks.LEAST_CHUNKS - 1))
    assert few == [[], [], [], []]


def test_exact_numerics_allow_for_last_bits() -> None:
    exact = ranks.ladders([0.0] * 200, [32] * 200)
    assert evidence([0.0078] * 100, exact) < 0
    assert evidence([0.5] * 8, exact) > 13


def test_signs_and_exponents_count_as_mantissas_do() -> None:
    plain = ChunkDifference(0, 1.0, 1.0, 128, degenerate=False)
    worse = ChunkDifference(2, 1.0, 1.0, 128, degenerate=False, sign_mismatches=1)
    assert ranks.distance(plain) == 1.0
    assert ranks.distance(worse) == 2.5
