"""A scenario that is measured from a run is that run: what a trial shows gives the trial again."""

import tomllib

import pytest

from shoal.coordinator.store.tables import LeaseRow
from shoal.errors import ConfigError
from shoal.protocol.assignment import slot_seed
from shoal.protocol.steps import StepId, step_secret
from shoal.simulation import LocalCoordinator
from shoal.simulation.swarm import SwarmResult, run_swarm
from shoal.simulation.swarm.driver import Swarm
from shoal.simulation.swarm.spec import SwarmSpec, build_scenario
from shoal.simulation.swarm.trial import Contents, _named_apart, describe, read_tables, to_toml
from simulation.swarm.small import spec, tree


class OpenStore(LocalCoordinator):
    """Can be read after the run."""

    def close(self) -> None:
        pass


def seed_of(secret: bytes, lease: LeaseRow) -> str:
    return slot_seed(step_secret(secret, StepId(0, lease.step, 0)), lease.slot).hex()


def measured(original: SwarmSpec) -> tuple[SwarmResult, SwarmSpec]:
    """What a swarm came to, and the scenario that its store shows."""
    swarm = Swarm(original, OpenStore)
    result, coordinator, workload = swarm.run(), swarm.world.coordinator, swarm.world.workload
    assert isinstance(coordinator, OpenStore)
    tables, run = read_tables(coordinator.connection), coordinator.run
    lengths = {
        file.submission_id: workload.of(seed_of(run.secret, tables.leases[file.lease_id])).lengths
        for file in tables.files
        if file.lease_id in tables.leases
    }
    found = describe(tables, swarm.world.config, Contents([100], lengths))
    coordinator.connection.close()
    return result, build_scenario(tomllib.loads(to_toml(found | {"run": {"steps": original.run.steps}})))


@pytest.mark.parametrize("step_s", [20.0, 2.0], ids=["trainer-is-the-limit", "swarm-is-the-limit"])
def test_a_measured_swarm_is_predicted(step_s: float) -> None:
    unequal = tree(trainer={"step_s": step_s, "stage_s": 0.5}, run={"steps": 24})
    unequal["workers"] = [
        {"name": "fast", "count": 2, "tokens_per_s": 300, "rows": 8, "deliver_s": 0.4},
        {"name": "slow", "count": 2, "tokens_per_s": 100, "rows": 8, "deliver_s": 0.4},
    ]
    result, found = measured(build_scenario(unequal))
    assert found.trainer.step_s == pytest.approx(step_s, rel=0.02)
    assert found.work.useful_share == pytest.approx(0.7, abs=0.08)
    assert found.work.spread == pytest.approx(0.5, abs=0.1)
    assert found.validators.audit_tokens_per_s == pytest.approx(20_000, rel=0.1)
    for seen, given in zip(found.workers, (100, 100, 300, 300), strict=True):
        assert seen.rows == 8
        assert seen.tokens_per_s == pytest.approx(given, rel=0.1)
        assert seen.deliver_s == pytest.approx(0.4, abs=0.15)
    predicted = run_swarm(found)
    assert predicted.steps_per_minute == pytest.approx(result.steps_per_minute, rel=0.15)
    assert predicted.mean_age == pytest.approx(result.mean_age, abs=0.3)  # of 150 groups
    assert predicted.trainer_wait == pytest.approx(result.trainer_wait, abs=0.1)
    assert predicted.workers_wait == pytest.approx(result.workers_wait, abs=0.1)


def test_a_run_that_has_hardly_begun_cannot_be_measured() -> None:
    swarm = Swarm(spec(run={"steps": 4}), OpenStore)
    swarm.run()
    coordinator = swarm.world.coordinator
    assert isinstance(coordinator, OpenStore)
    with pytest.raises(ConfigError, match="at least 9 are needed"):
        describe(read_tables(coordinator.connection), swarm.world.config, Contents([1], {}))


def test_names_that_contributors_chose_are_made_unique_and_can_be_written() -> None:
    chosen = ["gpu", "gpu", "gpu 2", "\U0001f41f", 'a "quoted" \\ name', "\x1b[2J", ""]
    found = _named_apart([{"name": name, "count": 1, "tokens_per_s": 200.0} for name in chosen])
    names = [one["name"] for one in found]
    assert names[:4] == ["gpu", "gpu 2", "gpu 2 2", "\U0001f41f"]
    assert len(set(names)) == len(names)
    written = build_scenario(tomllib.loads(to_toml(tree() | {"workers": found})))
    assert [one.name for one in written.workers] == names
