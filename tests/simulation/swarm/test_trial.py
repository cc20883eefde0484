"""A scenario that is measured from a run is that run: what a trial shows gives the trial again."""

import tomllib

import pytest

from shoal.errors import ConfigError
from shoal.simulation import LocalCoordinator
from shoal.simulation.swarm import SwarmResult, run_swarm
from shoal.simulation.swarm.driver import Swarm
from shoal.simulation.swarm.spec import SwarmSpec, build_scenario
from shoal.simulation.swarm.trial import describe, fit_engine, read_tables, to_toml
from simulation.swarm.small import spec, tree


class OpenStore(LocalCoordinator):
    """Can be read after the run."""

    def close(self) -> None:
        pass


def measured(original: SwarmSpec) -> tuple[SwarmResult, SwarmSpec]:
    """What a swarm came to, and the scenario that its store shows."""
    swarm = Swarm(original, OpenStore)
    result, coordinator, workload = swarm.run(), swarm.world.coordinator, swarm.world.workload
    assert isinstance(coordinator, OpenStore)
    lengths = [length for work in workload._known.values() for length in work.lengths]
    found = describe(read_tables(coordinator.connection), swarm.world.config, [100] * len(lengths), lengths)
    coordinator.connection.close()
    return result, build_scenario(tomllib.loads(to_toml(found | {"run": {"steps": original.run.steps}})))


@pytest.mark.parametrize("step_s", [20.0, 2.0], ids=["trainer-is-the-limit", "swarm-is-the-limit"])
def test_a_measured_swarm_is_predicted(step_s: float) -> None:
    unequal = tree(trainer={"step_s": step_s, "stage_s": 0.5}, run={"steps": 24})
    unequal["workers"] = [
        {"name": "fast", "count": 2, "tokens_per_s": 300, "rows": 8},
        {"name": "slow", "count": 2, "tokens_per_s": 100, "rows": 8},
    ]
    result, found = measured(build_scenario(unequal))
    assert found.trainer.step_s == pytest.approx(step_s, rel=0.02)
    assert found.work.useful_share == pytest.approx(0.7, abs=0.08)
    assert found.work.spread == pytest.approx(0.5, abs=0.1)
    assert found.validators.audit_tokens_per_s == pytest.approx(20_000, rel=0.1)
    predicted = run_swarm(found)
    assert predicted.steps_per_minute == pytest.approx(result.steps_per_minute, rel=0.15)
    assert predicted.mean_age == pytest.approx(result.mean_age, abs=0.3)  # of 150 groups
    assert predicted.trainer_wait == pytest.approx(result.trainer_wait, abs=0.1)
    assert predicted.workers_wait == pytest.approx(result.workers_wait, abs=0.1)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_an_engine_is_found_from_its_speed_and_the_time_of_a_slot(rows: int) -> None:
    from shoal.simulation.swarm.trial import _engine_alone

    lengths = [50, 80, 100, 120, 200, 400]
    speed, slot_s = _engine_alone(lengths, 16, rows, 1000.0)
    found_rows, found_speed = fit_engine(lengths, 16, speed, slot_s)
    assert found_speed == pytest.approx(1000.0, rel=0.1)
    assert rows / 2 <= found_rows <= 2 * rows


def test_a_run_that_has_hardly_begun_cannot_be_measured() -> None:
    swarm = Swarm(spec(run={"steps": 4}), OpenStore)
    swarm.run()
    coordinator = swarm.world.coordinator
    assert isinstance(coordinator, OpenStore)
    with pytest.raises(ConfigError, match="at least 9 are needed"):
        describe(read_tables(coordinator.connection), swarm.world.config, [1], [1])
