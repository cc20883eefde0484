import pytest

from shoal.metrics.units import memory, size


@pytest.mark.parametrize(
    ("amount", "shown"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (999_999, "1.0 MB"), (138_000_000, "138 MB")]
)
def test_sizes(amount: int, shown: str) -> None:
    assert size(amount) == shown


@pytest.mark.parametrize(
    ("amount", "shown"), [(999, "999.00 B"), (1000, "0.98 KiB"), (1_468_006, "1.40 MiB"), (70.6 * 2**30, "70.60 GiB")]
)
def test_memory_of_small_policies_is_not_nothing(amount: float, shown: str) -> None:
    assert memory(amount) == shown
