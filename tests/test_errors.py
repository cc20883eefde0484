"""The one tree of exceptions."""

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import shoal
from shoal.errors import ConfigError, RefusedError, ShoalError, UnavailableError

NOT_IMPORTED = ("__main__", "vllm", "worker_process", "sandbox.runner")
"""Programs of their own, and what needs a package that is not installed everywhere."""


def error_classes() -> list[type[ShoalError]]:
    for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
        if not any(part in module.name for part in NOT_IMPORTED):
            importlib.import_module(module.name)
    return sorted(set(_below(ShoalError)), key=lambda kind: kind.__name__)


def _below(kind: type[ShoalError]) -> Iterator[type[ShoalError]]:
    for child in kind.__subclasses__():
        if child.__module__.startswith("shoal."):
            yield child
            yield from _below(child)


def test_every_error_says_whether_starting_again_can_help() -> None:
    undecided = [
        kind.__name__ for kind in error_classes() if ShoalError in kind.__bases__ and "permanent" not in vars(kind)
    ]
    assert undecided == []


def test_codes_are_not_shared_by_unrelated_errors() -> None:
    by_code: dict[str, list[type[ShoalError]]] = {}
    for kind in error_classes():
        by_code.setdefault(vars(kind).get("code", ""), []).append(kind)
    by_code.pop("", None)
    assert {code: kinds for code, kinds in by_code.items() if len(kinds) > 1} == {}


@pytest.mark.parametrize(
    ("error", "permanent"),
    [
        (ConfigError("A wrong flag."), True),
        (UnavailableError("Nobody there."), False),
        (RefusedError("banned", "This key is banned.", permanent=True), True),
        (RefusedError("rate_limited", "Too many."), False),
    ],
)
def test_what_a_supervisor_may_start_again(error: ShoalError, permanent: bool) -> None:
    assert error.permanent is permanent
