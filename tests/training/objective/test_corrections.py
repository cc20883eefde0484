"""Lag corrections against their formulas."""

import pytest
import torch

from shoal.training.objective.corrections import CORRECTIONS

LOG_RATIO = torch.tensor([0.1, 4.0, 8.0, 1.0]).log()
ROWS = torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", [1.0, 1.0, 1.0, 1.0]),
        ("truncated_token", [0.1, 4.0, 5.0, 1.0]),
        ("truncated_sequence", [0.4, 0.4, 5.0, 5.0]),
        ("masked", [0.0, 1.0, 0.0, 1.0]),
        ("decoupled", [0.1, 4.0, 0.0, 1.0]),
    ],
)
def test_weights(name: str, expected: list[float]) -> None:
    torch.testing.assert_close(CORRECTIONS[name](LOG_RATIO, ROWS, 2, 5.0), torch.tensor(expected))


@pytest.mark.parametrize("name", CORRECTIONS)
def test_no_lag_needs_no_correction(name: str) -> None:
    weights = CORRECTIONS[name](torch.zeros(3), torch.tensor([0, 0, 1]), 2, 2.0)
    assert weights.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_extreme_lag_stays_finite(name: str) -> None:
    weights = CORRECTIONS[name](torch.tensor([200.0, -200.0]), torch.tensor([0, 1]), 2, 2.0)
    assert weights.isfinite().all()
    assert (weights >= 0).all()
