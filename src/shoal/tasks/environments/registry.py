"""Environments by name, and what a run's descriptor says of them.

A name is a built-in one or `module:Class`. Class attributes, all optional, say how it is replayed and what its limits are:
`replay`, `role`, `opens`, `max_turns`, `turn_tokens`, `observation_tokens`, `step_s`, `requires`. The digest covers its source:
every Python file of the package or module that defines it. Code that is not the run's, or runs on another runtime, is refused.
"""

import inspect
import platform
import sys
from collections.abc import Collection, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from blake3 import blake3
from pydantic import ValidationError

from shoal.config import TasksConfig
from shoal.errors import ShoalError
from shoal.protocol.environments import EnvironmentLimits, EnvironmentReference
from shoal.tasks.environments.contract import EnvironmentConfigError
from shoal.tasks.environments.loading import BUILTIN, find_environment
from shoal.tasks.environments.tools import tool_names, tool_schema
from shoal.tasks.task import Task, TaskSet
from shoal.tasks.verifiers.registry import ENVIRONMENT_PREFIX as TASK_PREFIX

REPLAYS = ("exact", "tolerant")


class OwnEnvironmentError(ShoalError):
    """A run that needs its owner's own code, which this machine may not import."""

    code = "own_environment"
    permanent = True


class OtherEnvironmentError(ShoalError):
    """Code or runtime of an environment that is not the one of the run."""

    code = "other_environment"
    permanent = True


def environment_of(task: Task, usual: str) -> str:
    """The environment that a task's episodes meet, `usual` if it names none; empty for a task that a verifier scores."""
    return task.task_type.removeprefix(TASK_PREFIX) if task.task_type.startswith(TASK_PREFIX) else usual


def environment_names(tasks: TaskSet, settings: TasksConfig) -> list[str]:
    """Every environment that a run uses."""
    named = {kind.removeprefix(TASK_PREFIX) for kind in tasks.task_types if kind.startswith(TASK_PREFIX)}
    others = any(not kind.startswith(TASK_PREFIX) for kind in tasks.task_types)
    return sorted(named | ({settings.environment} if settings.environment and others else set()))


def is_own(name: str) -> bool:
    return name not in BUILTIN


def refer(name: str) -> EnvironmentReference:
    """What a descriptor says of the environment that is installed here."""
    kind = find_environment(name)
    replay: Any = getattr(kind, "replay", "exact")
    if replay not in REPLAYS:
        raise EnvironmentConfigError(
            f"{name} declares replay = {replay!r}: what needs the network, a clock or a model that scores cannot be replayed by a "
            "validator, so nobody could verify it.",
            hint=f"A run takes environments that are {' or '.join(REPLAYS)}.",
        )
    limits = {field: getattr(kind, field) for field in EnvironmentLimits.model_fields if hasattr(kind, field)}
    is_tools = not callable(getattr(kind, "step", None))
    try:
        return EnvironmentReference(
            name=name,
            replay=replay,
            role=getattr(kind, "role", "tool" if is_tools else "user"),
            opens=getattr(kind, "opens", True),
            code_digest=code_digest(kind),
            runtime=runtime_of(kind),
            limits=EnvironmentLimits(**limits),
            tools=tuple(tool_schema(getattr(kind, tool)) for tool in tool_names(kind)) if is_tools else (),
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise EnvironmentConfigError(f"{name}: {first['loc'][0]}: {first['msg'].lower()}.") from None


def code_digest(kind: type) -> str:
    """64 hex digits over the source files of the environment."""
    hasher = blake3()
    for name, data in _sources(kind):
        hasher.update(f"{len(name)}:{name}{len(data)}:".encode() + data)
    return hasher.hexdigest()


def _sources(kind: type) -> Iterable[tuple[str, bytes]]:
    module = sys.modules[kind.__module__]
    root = kind.__module__.partition(".")[0]
    if root == "shoal":
        tasks = Path(__file__).parent.parent
        files = [*tasks.glob("environments/*.py"), *tasks.glob("verifiers/*.py")]
        return [(str(file.relative_to(tasks)), file.read_bytes()) for file in sorted(files)]
    folders = list(getattr(sys.modules.get(root), "__path__", ()))
    if folders:
        found = [(str(file.relative_to(folder)), file) for folder in folders for file in Path(folder).rglob("*.py")]
        return [(name, file.read_bytes()) for name, file in sorted(found)]
    file = Path(inspect.getfile(module))
    return [(file.name, file.read_bytes())]


def runtime_of(kind: type) -> str:
    """Python's minor version and the releases of what tokens and results depend on."""
    python = ".".join(platform.python_version_tuple()[:2])
    packages = ("tokenizers", *getattr(kind, "requires", ()))
    return ", ".join([f"Python {python}", *(f"{name} {_release(name)}" for name in packages)])


def _release(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        raise EnvironmentConfigError(f"The package {name} is not installed.", hint=f"pip install {name}") from None


def check_environments(
    references: Iterable[EnvironmentReference], *, own_environments: Collection[str] | None = None
) -> None:
    """Refuses what may not be imported here, and what is not the code or runtime of the run. None trusts the run's owner."""
    for expected in references:
        if is_own(expected.name) and own_environments is not None and expected.name not in own_environments:
            raise OwnEnvironmentError(
                f"The run's episodes meet {expected.name}, code of its owner that would be imported here.",
                hint=f"If you trust it and have it installed, join with --verifier {expected.name}.",
            )
        found = refer(expected.name)
        if found.runtime != expected.runtime:
            raise OtherEnvironmentError(
                f"The run's {expected.name} needs {expected.runtime}; here it is {found.runtime}.",
                hint="Install the releases that the run's owner uses.",
            )
        if found != expected:
            raise OtherEnvironmentError(
                f"{expected.name} is not the code that the run was made with.",
                hint="Install the release that the run's owner uses.",
            )
