"""docs/reference/codes.md: reasons of verdicts, refusals of the coordinator, errors of the commands."""

import importlib
import pkgutil
from collections.abc import Iterator

import shoal
from shoal.errors import RefusedError, ShoalError
from shoal.protocol.refusals import REFUSALS
from shoal.protocol.verdicts import REASONS
from tools.reference.text import item, wrapped

OPTIONAL = ("shoal.policy.vllm",)
"""Packages whose modules need software that the docs are built without."""
INTRODUCTION = (
    "Codes are stable: programs may depend on them. The sentences beside them may change."
    " The severity of a reason decides what follows for the worker: a *proof* slashes its stake, bans its key and"
    " withdraws its unconsumed groups; an *anomaly*, which honest work causes rarely, lowers its trust state and raises"
    " its audit rate; a *fault* has no consequence for the worker, and the submission is tried again."
)
REFUSED = (
    "The coordinator answers a request that it refuses with `{code, message, hint}` and changes nothing."
    " The client raises `RefusedError` with the same code."
)
FAILED = (
    "A command that fails prints the message and the hint of one of these. *Permanent* errors end with exit code 78:"
    " the same command fails again until somebody changes something, so a supervisor does not restart it."
)


def page() -> str:
    lines = ["# Codes", "", wrapped(INTRODUCTION), "", "## Reasons of verdicts", ""]
    lines += [item(f"**`{reason}`** ({severity}): {meaning}") for reason, (severity, meaning) in REASONS.items()]
    lines += ["", "## Refusals of the coordinator", "", wrapped(REFUSED), ""]
    lines += [item(f"**`{code}`** ({_statuses(code)}): {REFUSALS[code].meaning}") for code in sorted(REFUSALS)]
    lines += ["", "## Errors of commands", "", wrapped(FAILED), ""]
    lines += [
        item(_described(error)) for error in sorted(set(errors()), key=lambda error: (error.code, error.__name__))
    ]
    return "\n".join(lines) + "\n"


def _statuses(code: str) -> str:
    return ", ".join(map(str, REFUSALS[code].statuses))


def errors() -> Iterator[type[ShoalError]]:
    """Every public class of the tree of exceptions."""
    for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
        if not module.name.startswith(OPTIONAL) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    yield from _below(ShoalError)


def _below(kind: type[ShoalError]) -> Iterator[type[ShoalError]]:
    for child in kind.__subclasses__():
        if child is not RefusedError and _is_listed(child):
            yield child
        yield from _below(child)


def _is_listed(kind: type[ShoalError]) -> bool:
    """Whatever this process has imported besides: the page is the same everywhere."""
    module = kind.__module__
    return module.startswith("shoal.") and not module.startswith(OPTIONAL) and not kind.__name__.startswith("_")


def _described(error: type[ShoalError]) -> str:
    kind = ", permanent" if getattr(error, "permanent", False) else ""
    return f"**`{error.code}`** (`{error.__name__}`{kind}): {' '.join((error.__doc__ or '').split())}"
