"""Scenario files: each value has its reason; a wrong one is refused with the nearest right key."""

import re
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.simulation.swarm.spec import BUNDLED, build_scenario, bundled_names, load_scenario
from simulation.swarm.small import tree


def test_the_package_has_the_four_scenarios() -> None:
    assert bundled_names() == ["home-swarm", "intellect-2", "ten-thousand-laptops", "university-lab"]
    assert load_scenario("ten-thousand-laptops").machines == 10_000


@pytest.mark.parametrize("name", bundled_names())
def test_every_value_of_a_scenario_has_its_reason(name: str) -> None:
    lines = (BUNDLED / f"{name}.toml").read_text().splitlines()
    values = [line for line in lines if re.match(r"\w+ = ", line)]
    assert [line for line in values if not re.search(r"\S\s+# \S", line)] == []
    assert len(values) > 30
    assert all(len(line) <= 132 for line in lines)


@pytest.mark.parametrize("name", bundled_names())
def test_cheating_does_not_pay_in_a_scenario(name: str) -> None:
    from shoal.coordinator.rules.trust import LossRule

    LossRule.of(load_scenario(name).config()).require()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"trainer": {"step_sec": 3.0}}, "Did you mean trainer.step_s?"),
        ({"workers": {"token_per_s": 3.0}}, "Did you mean workers.tokens_per_s?"),
        ({"worker": {"count": 1}}, "Did you mean workers?"),
        ({"settings": {"training": {"group_per_step": 3}}}, "Did you mean training.groups_per_step?"),
        ({"settings": {"trainning": {"epochs": 3}}}, "training"),
        ({"workers": {"tokens_per_s": -5.0}}, "greater than 0"),
        ({"workers": {"down_mbit_s": float("inf")}}, "finite"),
        ({"workers": {"count": 0}}, "greater than or equal to 1"),
        ({"workers": {"conduct": "evil"}}, "honest"),
        ({"workers": {"conduct": "stall"}}, "Nobody in this swarm is honest"),
        ({"work": {"useful_share": 0.0}}, "greater than 0"),
        ({"run": {"steps": 1}}, "greater than or equal to 2"),
    ],
)
def test_a_wrong_scenario_is_refused_with_the_nearest_right_key(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_scenario(tree(**change))
    assert says in str(refusal.value)


def test_an_empty_swarm_is_refused() -> None:
    with pytest.raises(ConfigError, match="swarm is empty"):
        build_scenario(tree() | {"workers": []})
    with pytest.raises(ConfigError, match="no trainer"):
        build_scenario({name: part for name, part in tree().items() if name != "trainer"})


def test_a_name_that_is_nearly_right_is_corrected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean home-swarm"):
        load_scenario("home-swam")
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\nsteps = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_scenario(broken)
