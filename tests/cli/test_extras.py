"""A command whose extra is missing says what to install, before it does anything; others do not care."""

import importlib.util
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import extras
from shoal.cli.extras import MODULES, NEEDED, MissingExtraError, check_extra, missing_extra
from shoal.cli.main import main
from tools.reference import commands

ROOT = Path(__file__).parents[2]


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an environment that has the package alone."""
    find: Callable[..., Any] = importlib.util.find_spec
    heavy = {name for modules in MODULES.values() for name in modules}
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name in heavy else find(name, *rest))


@pytest.mark.usefixtures("light")
def test_a_worker_without_its_extra_is_one_sentence_with_the_line_to_type(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["work", "http://nowhere.invalid:7300", "--dir", str(tmp_path / "w")])
    said = capsys.readouterr().err
    assert end.value.code == 78
    assert said.count("\n") == 1
    assert "`shoal work` needs torch, transformers, safetensors, numba, datasets, which are not installed" in said
    assert re.search(r"pip install '\./shoal-[\d.]+-py3-none-any\.whl\[worker\]'", said)
    assert not (tmp_path / "w").exists()


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("command", [name for names in NEEDED.values() for name in names])
def test_help_works_without_the_extra(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert "Usage" in capsys.readouterr().out


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("command", ["relay", "coordinator", "doctor", "config", "logs"])
def test_roles_without_a_model_need_no_extra(command: str) -> None:
    assert not [extra for extra, names in NEEDED.items() if command in names]


def test_only_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "missing_modules", lambda extra: ["matplotlib"])
    with pytest.raises(MissingExtraError, match=r"needs matplotlib, which is not installed\. Type .*\[train\]"):
        check_extra("demo", "train")


def test_a_package_that_is_missed_in_the_middle_is_named_the_same_way() -> None:
    found = missing_extra(ModuleNotFoundError("No module named 'matplotlib.figure'", name="matplotlib.figure"))
    assert found is not None
    assert "needs matplotlib" in str(found)
    assert missing_extra(ModuleNotFoundError("No module named 'shoal.nothing'", name="shoal.nothing")) is None


def test_the_extras_are_those_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {re.match(r"[\w-]+", line)[0] for line in declared["dependencies"]}  # type: ignore[index]
    for extra, modules in MODULES.items():
        named = {re.match(r"[\w-]+", line)[0] for line in declared["optional-dependencies"][extra]}  # type: ignore[index]
        assert set(modules) <= named
        assert not set(modules) & base
    assert "shoal[worker]" in declared["optional-dependencies"]["train"]


def test_every_command_that_needs_an_extra_exists() -> None:
    known = {name.split()[1] for name, _ in commands.commands()}
    assert {name for names in NEEDED.values() for name in names} <= known
