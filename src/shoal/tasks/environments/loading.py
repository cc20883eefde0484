"""Environment classes by name, and objects of them. Imports nothing beyond the standard library: a process begins with it.

A name is a built-in one or `module:Class`. A class without `step` is a set of tools and is wrapped.
"""

import importlib
from typing import Any

from shoal.tasks.environments.contract import EnvironmentConfigError
from shoal.tasks.environments.tools import ToolEnvironment

BUILTIN = {
    "calculator": "shoal.tasks.environments.calculator:Calculator",
    "guess-number": "shoal.tasks.environments.guess_number:GuessNumber",
    "reasoning-gym": "shoal.tasks.environments.attempts:GymAttempts",
}


def find_environment(name: str) -> type:
    """The class, imported."""
    target = BUILTIN.get(name, name)
    module_name, _, class_name = target.partition(":")
    if not class_name:
        known = ", ".join(sorted(BUILTIN))
        raise EnvironmentConfigError(f"There is no environment {name!r}.", hint=f"Known: {known}, or module:Class.")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise EnvironmentConfigError(
            f"The environment {name} cannot be imported: {error}.",
            hint="Install the module that the owner names, or add its folder to PYTHONPATH.",
        ) from None
    if not isinstance(found, type) or not callable(getattr(found, "reset", None)):
        raise EnvironmentConfigError(f"{name} is not an environment.", hint="It is a class with `reset` and `step`.")
    return found


def make_environment(kind: type) -> Any:
    """A fresh object with `reset(seed, **task)` and `step(action)`; a class of tools is wrapped."""
    made = kind()
    return made if callable(getattr(made, "step", None)) else ToolEnvironment(made)
