"""The lower bound that the benchmark of deltas compares itself with."""

import runpy
from pathlib import Path

import numpy as np
import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "delta.py"
bound_bytes = runpy.run_path(str(BENCHMARK))["bound_bytes"]


def test_equal_weights_need_nothing() -> None:
    weights = np.arange(1000, dtype=np.uint16)
    assert bound_bytes(weights, weights) == 0


def test_one_step_for_half_of_the_weights_costs_the_positions_alone() -> None:
    base = np.full(8000, 0x3F80, np.uint16)
    new = base.copy()
    new[::2] += 1
    assert bound_bytes(base, new) == pytest.approx(1000)


def test_equally_likely_steps_up_and_down_cost_a_bit_each() -> None:
    base = np.full(8000, 0x3F80, np.uint16)
    new = base.copy()
    new[::4] += 1
    new[2::4] -= 1
    assert bound_bytes(base, new) == pytest.approx(1000 + 500)


def test_a_step_over_zero_is_a_step_of_one_place() -> None:
    base = np.full(80, 0x8000, np.uint16)  # -0
    new = base.copy()
    new[::2] = 0  # +0, the next number up
    other = np.full(80, 0x3F80, np.uint16)
    up = other.copy()
    up[::2] += 1
    assert bound_bytes(np.concatenate([base, other]), np.concatenate([new, up])) == pytest.approx(20)
