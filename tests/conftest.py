"""Property tests run the same way every time, and never depend on the speed of the machine. A disk that can be filled."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.tiny_disks import TinyDisk, mounted

settings.register_profile(
    "shoal",
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("shoal")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[TinyDisk]:
    with mounted(tmp_path / "tiny") as disk:
        if disk is None:
            pytest.skip("only root may mount a tiny disk")
        yield disk
