"""Property tests run the same way every time, and never depend on the speed of the machine. A disk that can be filled.

In CI no test of the fast suite may be skipped: it fails and says what is missing.
"""

import os
from collections.abc import Generator, Iterator
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("CI") and item.get_closest_marker("slow") is None:
        report.outcome, report.longrepr = "failed", f"skipped, which CI does not allow: {report.longreprtext}"
    return report


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[TinyDisk]:
    with mounted(tmp_path / "tiny") as disk:
        if disk is None:
            pytest.skip("only root may mount a tiny disk")
        yield disk
