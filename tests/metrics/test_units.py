import pytest

from shoal.metrics.units import size


@pytest.mark.parametrize(
    ("amount", "shown"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (999_999, "1.0 MB"), (138_000_000, "138 MB")]
)
def test_sizes(amount: int, shown: str) -> None:
    assert size(amount) == shown
