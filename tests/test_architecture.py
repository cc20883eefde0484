"""The import rules of the package: a room imports only from rooms below it, and torch-free rooms stay torch-free."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal

ROOT = Path(shoal.__file__).parent

ROOMS = (
    "__main__",
    "cli",
    "data_commands",
    "asking_flags",
    "record_commands",
    "role_commands",
    "run_commands",
    "owner",
    "restores",
    "backups",
    "bucket_rollouts",
    "demo",
    "doctor",
    "roles",
    "joining",
    "tools",
    "inspection",
    "supervisor",
    "observe",
    "flags",
    "runs",
    "curation",
    "training",
    "validation",
    "worker",
    "coordinator",
    "evaluation",
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
TORCH_ROOMS = {"curation", "training", "validation", "worker", "evaluation", "policy", "proofs"}
HEAVY = ("torch", "transformers", "numba", "vllm")


def room_of(path: Path) -> str:
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


def imported_rooms(path: Path) -> set[str]:
    parts = [name.split(".") for name in imported_names(path)]
    used = {part[1] for part in parts if part[0] == "shoal" and len(part) > 1}
    return {room for room in used if not room.startswith("__version")}


def test_every_room_has_its_place() -> None:
    found = {room_of(path) for path in modules()}
    assert found == set(ROOMS), "give a new room its place in ROOMS and in docs/architecture.md"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_from_rooms_below_it(path: Path) -> None:
    room = room_of(path)
    below = set(ROOMS[ROOMS.index(room) + 1 :]) if room in ROOMS else set()
    above = imported_rooms(path) - below - {room}
    assert not above, f"{room} must not import {', '.join(sorted(above))}"


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


def test_torch_free_rooms_start_without_anything_heavy() -> None:
    rooms = [f"shoal.{room}" for room in reversed(ROOMS) if room not in TORCH_ROOMS and room != "__main__"]
    import_in_order(rooms, HEAVY)


def test_no_corner_of_a_torch_free_room_imports_torch() -> None:
    corners = [
        ".".join(("shoal", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for path in modules()
        if room_of(path) not in TORCH_ROOMS and path.stem != "__main__"
    ]
    import_in_order(corners, ("torch", "transformers", "vllm"))
