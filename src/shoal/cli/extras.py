"""Which commands need more than the package alone, and the one sentence that says how to install it.

The package alone serves relays, coordinators and contributors' tools. `worker` adds what runs a model, `train` what trains one and
draws its curves. A command is refused before it does anything; a package that turns out to be missing later is named the same way.
"""

import importlib.util
from collections.abc import Callable
from functools import wraps
from typing import Any

from shoal import __version__
from shoal.errors import ShoalError

MODULES = {
    "worker": ("torch", "transformers", "safetensors", "numba", "datasets"),
    "train": ("matplotlib",),
}
"""Extra → what it adds; `train` brings `worker` too. The names are those of pyproject.toml."""
WHEEL = f"shoal-{__version__}-py3-none-any.whl"
NEEDED = {
    "worker": ("work", "validate", "evaluator", "eval", "curate", "filter", "calibrate", "verify"),
    "train": ("init", "train", "export", "reproduce", "up", "demo", "sft", "plan-memory"),
}
"""Extra → commands that cannot do anything without it."""


class MissingExtraError(ShoalError):
    """A command whose packages are not installed."""

    code = "missing_extra"
    permanent = True


def install_line(extra: str) -> str:
    """Names the wheel's file: a name in an index could be anybody's."""
    return f"pip install './{WHEEL}[{extra}]', or `make setup` in a clone"


def missing_modules(extra: str) -> list[str]:
    wanted = MODULES["worker"] + MODULES["train"] if extra == "train" else MODULES[extra]
    return [name for name in wanted if importlib.util.find_spec(name) is None]


def check_extra(command: str, extra: str) -> None:
    if missing := missing_modules(extra):
        raise MissingExtraError(
            f"`shoal {command}` needs {', '.join(missing)}, which {_is(missing)} not installed.",
            hint=f"Type {install_line(extra)}.",
        )


def missing_extra(error: ModuleNotFoundError) -> MissingExtraError | None:
    """What to say of a package that was missed in the middle of a command; None if it belongs to no extra."""
    name = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in MODULES.items() if name in modules), None)
    if extra is None:
        return None
    return MissingExtraError(f"This needs {name}, which is not installed.", hint=f"Type {install_line(extra)}.")


def with_extra(command: str, function: Callable[..., None]) -> Callable[..., None]:
    """The same command, refused at once where its extra is missing. `--help` works without it."""
    extra = next((extra for extra, commands in NEEDED.items() if command in commands), None)
    if extra is None:
        return function

    @wraps(function)
    def checked(*args: Any, **given: Any) -> None:
        check_extra(command, extra)
        function(*args, **given)

    return checked


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
