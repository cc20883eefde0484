"""Functions by name from the config: a built-in name, or `module:function` of the user's own.

A user's function is imported from the Python path and called like a built-in one; nothing in the package is touched.
"""

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from shoal.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])


def find_function(kind: str, name: str, builtin: Mapping[str, Function]) -> Function:
    """The function that the setting `training.<kind>` names."""
    if name in builtin:
        return builtin[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        nearest = difflib.get_close_matches(name, builtin, n=1, cutoff=0.0)
        hint = f"Did you mean {nearest[0]!r}? There are {', '.join(builtin)}, or your own as module:function."
        raise ConfigError(f"There is no {kind} called {name!r}.", hint=hint)
    try:
        function = getattr(importlib.import_module(module_name), attribute, None)
    except ImportError as error:
        raise ConfigError(f"The {kind} {name!r} cannot be imported: {error}.", hint="Is it on PYTHONPATH?") from error
    if not callable(function):
        raise ConfigError(f"Module {module_name} has no function {attribute!r} to use as {kind}.")
    return cast(Function, function)
