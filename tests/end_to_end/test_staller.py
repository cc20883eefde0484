"""A real swarm goes on beside a key that takes leases and never submits."""

from pathlib import Path

import pytest

from end_to_end.staller import honest_swarm, phase

pytestmark = pytest.mark.slow


def test_two_honest_workers_go_on_beside_a_staller_whose_leases_outlast_the_test(tmp_path: Path) -> None:
    with honest_swarm(tmp_path / "run", lease_s=3600) as running:
        stalled = phase(running, 5, with_staller=True)
    assert stalled.stalled_leases >= 1
