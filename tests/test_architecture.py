"""The import rules of the package: a package imports only from packages below it, and torch-free packages stay torch-free."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal

ROOT = Path(shoal.__file__).parent

PACKAGES = (
    "__main__",
    "cli",
    "host",
    "roles",
    "owner",
    "inspection",
    "observe",
    "curation",
    "training",
    "validation",
    "worker",
    "coordinator",
    "evaluation",
    "joined",
    "policy",
    "proofs",
    "tasks",
    "broadcast",
    "rundir",
    "protocol",
    "metrics",
    "identity",
    "config",
    "locks",
    "files",
    "errors",
    "tether",
)
"""From the top down."""
TORCH_PACKAGES = {"curation", "training", "validation", "worker", "evaluation", "joined", "policy", "proofs"}
HEAVY = ("torch", "transformers", "numba", "vllm")


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imported_names(path: Path) -> Iterator[str]:
    """Every module that a file imports, at any depth, as a dotted name; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; write the whole name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_packages(path: Path) -> set[str]:
    parts = [name.split(".") for name in imported_names(path)]
    used = {part[1] for part in parts if part[0] == "shoal" and len(part) > 1}
    return {package for package in used if not package.startswith("__version")}


def test_every_package_has_its_place() -> None:
    found = {package_of(path) for path in modules()}
    assert found == set(PACKAGES), "give a new package its place in PACKAGES and in docs/architecture.md"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_imports_only_from_packages_below_it(path: Path) -> None:
    package = package_of(path)
    below = set(PACKAGES[PACKAGES.index(package) + 1 :]) if package in PACKAGES else set()
    above = imported_packages(path) - below - {package}
    assert not above, f"{package} must not import {', '.join(sorted(above))}"


@pytest.mark.parametrize("path", sorted((ROOT / "broadcast").rglob("*.py")), ids=lambda path: path.stem)
def test_broadcast_knows_neither_the_protocol_nor_the_settings_of_a_run(path: Path) -> None:
    assert not imported_packages(path) & {"protocol", "config"}


def import_in_order(names: list[str], banned: tuple[str, ...]) -> None:
    """Imports modules in a fresh interpreter; names the first that brings something heavy along."""
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = [heavy for heavy in {banned!r} if heavy in sys.modules]\n"
        "    assert not loaded, f'{name} imports {loaded}'\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, *names], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr


def test_torch_free_packages_start_without_anything_heavy() -> None:
    packages = [
        f"shoal.{package}" for package in reversed(PACKAGES) if package not in TORCH_PACKAGES and package != "__main__"
    ]
    import_in_order(packages, HEAVY)


def test_no_corner_of_a_torch_free_package_imports_torch() -> None:
    corners = [
        ".".join(("shoal", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for path in modules()
        if package_of(path) not in TORCH_PACKAGES and path.stem != "__main__"
    ]
    import_in_order(corners, ("torch", "transformers", "vllm"))
