import pytest

from shoal.tasks import length_penalty


@pytest.mark.parametrize(("target", "length", "penalty"), [(20, 20, 0.0), (20, 25, 0.05), (20, 12, 0.08), (0, 99, 0.0)])
def test_penalty_grows_with_the_distance_from_the_target(target: int, length: int, penalty: float) -> None:
    assert length_penalty(target, length, 0.01) == pytest.approx(penalty)
