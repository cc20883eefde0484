"""The wheel has every file of the package, names its extras, and brings nothing heavy by itself."""

import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from shoal import __version__
from shoal.cli.extras import MODULES, WHEEL
from tools.wheel import ROOT, build_wheel

PACKAGE = ROOT / "src" / "shoal"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_the_name_that_messages_and_docs_give_it(wheel: Path) -> None:
    assert wheel.name == WHEEL
    assert WHEEL in (ROOT / "README.md").read_text()


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("shoal/")}
    wanted = {
        f"shoal/{path.relative_to(PACKAGE).as_posix()}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == wanted


def test_a_base_install_brings_nothing_that_only_models_need(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"shoal-{__version__}.dist-info/METADATA").decode())
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    heavy = {name for modules in MODULES.values() for name in modules}
    assert required
    assert not [line for line in required if any(line.startswith(name) for name in heavy)]
    assert {"worker", "train"} <= set(metadata.get_all("Provides-Extra", []))
