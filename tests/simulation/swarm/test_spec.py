"""Scenario files: each value has its reason; a wrong one is refused with the nearest right key."""

import re
import tomllib
from collections.abc import Iterator
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
    with pytest.raises(ConfigError, match=r"has no \[trainer\]"):
        build_scenario({name: part for name, part in tree().items() if name != "trainer"})


def test_a_name_that_is_nearly_right_is_corrected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean home-swarm"):
        load_scenario("home-swam")
    with pytest.raises(ConfigError, match="Did you mean university-lab"):
        load_scenario("lab")
    with pytest.raises(ConfigError, match="Did you mean ten-thousand-laptops"):
        load_scenario("laptops.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\nsteps = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_scenario(broken)


def with_workers(*workers: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return tree() | ({"workers": list(workers)} if workers else {}) | sections


LAPTOP = tree()["workers"][0]
NASTY: dict[str, tuple[dict[str, Any], str]] = {
    "a number in quotes": (with_workers(LAPTOP | {"tokens_per_s": "120"}), "should be a valid number"),
    "a yes for a number": (with_workers(LAPTOP | {"count": True}), "should be a valid integer"),
    "two classes of one name": (with_workers(LAPTOP, LAPTOP), "Two classes of workers are called 'laptop'"),
    "one bracket too few": (with_workers(workers=LAPTOP), "Write [[workers]] with two brackets"),
    "a table of relays": (with_workers(relays={"count": 2}), "Write [[relays]] with two brackets"),
    "a name that moves the cursor": (with_workers(LAPTOP | {"name": "a\x1b[2J"}), "Leave control characters out"),
    "a key of another section": (tree(run={"step_s": 5.0}), "Did you mean trainer.step_s?"),
    "a setting outside of settings": (tree(trainer={"groups_per_step": 5}), "settings.training.groups_per_step?"),
    "a section outside of settings": (with_workers(training={"epochs": 2}), "Did you mean settings.training?"),
    "steps in the wrong place": (tree(settings={"run": {"steps": 5}}), "Did you mean run.steps?"),
    "a slot of a billion samples": (
        tree(settings={"rollouts": {"group_size": 10_000, "tasks_per_slot": 100_000}}),
        "A slot of 1,000,000,000 samples is too large",
    ),
    "capital letters": (with_workers(LAPTOP | {"Tokens_Per_S": 1}), "Did you mean workers.tokens_per_s?"),
    "an empty file": ({}, "The scenario is empty. Copy one of the package"),
    "a number for a section": (with_workers(work=5), "work is no section. Write [work]"),
    "a link of nothing": (with_workers(LAPTOP | {"down_mbit_s": 0}), "workers.0.down_mbit_s = 0 is wrong"),
    "half a machine": (with_workers(LAPTOP | {"count": 1.5}), "workers.0.count = 1.5 is wrong"),
}


@pytest.mark.parametrize("name", list(NASTY))
def test_the_nastiest_scenarios_are_refused_with_what_is_wrong(name: str) -> None:
    scenario, says = NASTY[name]
    with pytest.raises(ConfigError) as refusal:
        build_scenario(scenario)
    assert says in str(refusal.value)


def keys_of(part: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Of every key and section of a scenario; one class of workers or relays is enough."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(part[:1]):
        if isinstance(value, dict | list):
            yield from keys_of(value, (*path, key))
        if isinstance(key, str):
            yield (*path, key)


def typos(key: str) -> set[str]:
    """A letter too few, too many or in the wrong place, another separator, capitals."""
    swapped = key[1] + key[0] + key[2:]
    found = {key[:-1], key[0] + key[2:], key + "s", key.replace("_", "-"), key.replace("_", ""), swapped, key.upper()}
    return found - {key, "steps"}  # a key of its own, of [run]


@pytest.mark.parametrize("name", bundled_names())
def test_every_typo_in_every_key_of_a_scenario_is_answered_with_the_right_key(name: str) -> None:
    text, tried = (BUNDLED / f"{name}.toml").read_text(), 0
    for *path, key in keys_of(tomllib.loads(text)):
        for typo in typos(str(key)):
            wrong = part = tomllib.loads(text)
            for place in path:
                part = part[place]  # type: ignore[index]
            part[typo] = part.pop(str(key))
            with pytest.raises(ConfigError, match=rf"Did you mean (\S+\.)?{key}\?"):
                build_scenario(wrong)
            tried += 1
    assert tried > 200


@pytest.mark.parametrize(
    "content",
    [b"[run]\nsteps = " + b"9" * 5000, b"x = " + b"[" * 5000, b"\xef\xbb\xbf[run]", b"[run]\nname = '\xff'", b"\x00"],
    ids=["digits", "brackets", "byte-order-mark", "latin", "zero"],
)
def test_a_file_that_the_parser_cannot_read_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_scenario(path)


def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for where in (tmp_path / "file" / "below.toml", "a" * 5000):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_scenario(where)
    (tmp_path / "run.toml").write_text("[run]\ndir = 'run'\n")
    with pytest.raises(ConfigError, match="There is no scenario"):
        load_scenario(tmp_path / "run")
    with pytest.raises(ConfigError, match="is a directory"):
        load_scenario(tmp_path)
    with pytest.raises(ConfigError, match="Did you mean home-swarm"):
        load_scenario("HOME-SWARM")
