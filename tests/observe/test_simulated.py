from pathlib import Path

import pytest

from shoal.observe.simulated import simulated_curve, simulated_table, write_figure
from shoal.simulation.swarm import SwarmResult, run_swarm
from shoal.simulation.swarm.spec import build_scenario
from simulation.swarm.small import tree


@pytest.fixture(scope="module")
def result() -> SwarmResult:
    mixed = tree(run={"steps": 8})
    mixed["workers"].append({"name": "forger", "count": 1, "tokens_per_s": 200, "rows": 8, "conduct": "forge"})
    return run_swarm(build_scenario(mixed))


def test_the_table_says_what_a_run_needs_and_who_waits(result: SwarmResult) -> None:
    table = simulated_table(result)
    assert "scenario: 7 workers, 8 steps" in table
    assert "To keep this trainer busy at lag 2:" in table
    for words in ("time per step", "age of trained groups", "trainer waits", "origin sends", "hostile keys banned"):
        assert words in table
    assert "  laptop" in table
    assert "  forger" in table


def test_the_curve_has_its_size(result: SwarmResult) -> None:
    lines = simulated_curve(result).splitlines()
    assert len(lines) == 7
    assert "time per step, up to" in lines[0]


@pytest.mark.parametrize("name", ["swarm.svg", "swarm.png"])
def test_a_figure_is_written(result: SwarmResult, tmp_path: Path, name: str) -> None:
    write_figure([result, result], tmp_path / name)
    assert (tmp_path / name).stat().st_size > 1000
