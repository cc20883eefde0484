"""The import rules of the package: a package imports only from packages below it, and torch-free packages stay torch-free."""

import ast
import re
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
    "reproduction",
    "inspection",
    "observe",
    "curation",
    "training",
    "validation",
    "worker",
    "simulation",
    "coordinator",
    "evaluation",
    "joined",
    "policy",
    "frames",
    "proofs",
    "tasks",
    "broadcast",
    "contributor",
    "rundir",
    "protocol",
    "metrics",
    "identity",
    "config",
    "net",
    "locks",
    "files",
    "errors",
    "tether",
)
"""From the top down."""
TORCH_PACKAGES = {
    *("curation", "training", "validation", "worker", "evaluation", "joined", "policy", "frames", "proofs"),
    "reproduction",
}
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


MOST_MODULES, MOST_AT_TOP = 17, 10


def test_a_folder_has_few_enough_modules_to_be_seen_at_once() -> None:
    folders = {path.parent for path in modules()} - {ROOT}
    counts = {folder: sum(path.name != "__init__.py" for path in folder.glob("*.py")) for folder in folders}
    assert not {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > MOST_MODULES}
    assert len(list(ROOT.glob("*.py"))) <= MOST_AT_TOP


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


PURE = {
    *("bisect", "collections", "dataclasses", "enum", "fractions", "functools", "heapq", "itertools", "math", "typing"),
    "statistics",
    "blake3",
    "shoal.config",
    "shoal.errors",
    "shoal.coordinator.rules",
    "shoal.protocol.verdicts",
    "shoal.metrics.units",
}
NAMES_OF_STATES = {f"shoal.protocol.api.{name}" for name in ("OwnerState", "RunState", "WorkerState")}
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "__import__", "globals"}


@pytest.mark.parametrize("path", sorted((ROOT / "coordinator/rules").glob("*.py")), ids=lambda path: path.name)
def test_a_rule_of_the_swarm_is_pure(path: Path) -> None:
    """No SQL, no HTTP, no clock, no chance, no files: a simulator imports exactly this package."""
    used = {name for name in imported_names(path) if name not in NAMES_OF_STATES}
    impure = {name for name in used if not any(name == pure or name.startswith(f"{pure}.") for pure in PURE)}
    assert not impure, f"{path.name} imports {', '.join(sorted(impure))}"
    tree = ast.parse(path.read_text())
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not calls & IMPURE_CALLS
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global | ast.Nonlocal | ast.AsyncFunctionDef)]


STATEMENT = re.compile(r"(?:SELECT|INSERT INTO|UPDATE|DELETE FROM|CREATE TABLE|DROP TABLE|ALTER TABLE)\b.*", re.DOTALL)
STATE_CHANGE = re.compile(r"UPDATE (slots|leases|submissions|groups) SET")
BY_POSITION = re.compile(r"INSERT INTO [a-z_{}.]+ (VALUES|SELECT)")


def statements(path: Path) -> list[str]:
    """Strings that are SQL, f-strings with their fixed parts."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return [text for text in found if STATEMENT.match(text.strip())]


def test_sql_stays_in_the_coordinator() -> None:
    outside = {path: statements(path) for path in modules() if package_of(path) != "coordinator"}
    assert not {str(path.relative_to(ROOT)): found for path, found in outside.items() if found}
    assert statements(ROOT / "coordinator/store/records.py"), "the search finds what is there"


def test_the_database_is_opened_in_the_coordinator_only() -> None:
    users = {package_of(path) for path in modules() if {"sqlite3", "psycopg"} & set(imported_names(path))}
    assert users == {"coordinator"}


@pytest.mark.parametrize("path", sorted((ROOT / "coordinator").rglob("*.py")), ids=lambda path: path.name)
def test_rows_are_written_by_column_name_and_states_change_in_one_place(path: Path) -> None:
    found = statements(path)
    assert not [text for text in found if BY_POSITION.search(text)], "name the columns"
    retained = [text for text in found if STATE_CHANGE.search(text) and "state" in text.split("WHERE")[0]]
    assert not retained, "use store.rows.update, which checks the transition"


def test_rows_of_the_coordinator_are_typed() -> None:
    """Values of the database are objects until `store.rows` makes records of them."""
    for path in sorted((ROOT / "coordinator").rglob("*.py")):
        text = path.read_text()
        assert not re.search(r"[Rr]ow: (dict\[str, )?Any|-> (list\[)?(Row|Any)\b", text) or path.name in (
            "database.py",
            "rows.py",
        ), path
        assert 'row["' not in text or path.name in ("database.py", "meta.py", "rows.py"), path
