"""Reward models by name: `reward_model:NAME` as a part of the reward, or as the type of tasks without a verifiable answer.

Only the validator has the models. A worker claims nothing for what they score, so no claim about it can be false. A name that the
validator could not know is refused when a run is made and when a validator starts, never counted as nothing.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import pyarrow.compute as pc

from shoal.config import TASK_PART
from shoal.errors import ConfigError
from shoal.tasks.task import Task, TaskSet

PREFIX = "reward_model:"
_NAME = re.compile(r"reward_model:[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class LearnedPart:
    name: str
    """Of the reward model."""
    weight: float
    is_task: bool
    """The task has no other verifier, so the ranking is its task reward."""


def is_learned(verifier: str) -> bool:
    return _NAME.fullmatch(verifier) is not None


def learned_parts(task_type: str, parts: Mapping[str, float]) -> list[LearnedPart]:
    """What reward models add to the reward of a task of this type."""
    own = [LearnedPart(_model(task_type), parts.get(TASK_PART, 0.0 if parts else 1.0), True)]
    others = [LearnedPart(_model(name), weight, False) for name, weight in parts.items() if is_learned(name)]
    return [part for part in (own if is_learned(task_type) else []) + others if part.weight]


def verifiable(tasks: Collection[Task]) -> list[Task]:
    """Those that can be measured: a ranking inside a group does not measure a policy."""
    found = [task for task in tasks if not is_learned(task.task_type)]
    if tasks and not found:
        raise ConfigError(
            "Only reward models can score these tasks.", hint="Measure a policy on tasks with verifiable answers."
        )
    return found


def check_named(parts: Mapping[str, float], tasks: TaskSet, models: Mapping[str, str]) -> None:
    """Every reward model that is used has a directory, and every directory is used."""
    asked = dict(_asked(parts, tasks))
    for name, where in asked.items():
        if name not in models:
            known = f"It names {', '.join(models)}." if models else "It names none."
            raise ConfigError(f"{where} {PREFIX}{name}, which validation.reward_models does not name.", hint=known)
    for name in models:
        if name not in asked:
            raise ConfigError(
                f"validation.reward_models names {name}, but nothing uses it.",
                hint=f'Give it a weight: reward.parts = {{{TASK_PART} = 1.0, "{PREFIX}{name}" = 0.1}}.',
            )


def _asked(parts: Mapping[str, float], tasks: TaskSet) -> Iterator[tuple[str, str]]:
    """Names of reward models, each with what uses it."""
    for task_type in filter(is_learned, tasks.task_types):
        row = pc.index(tasks.table.column("task_type"), task_type).as_py()
        yield _model(task_type), f"Task {row} ({tasks[row].problem_id}) is scored by"
    for name in filter(is_learned, parts):
        yield _model(name), "reward.parts names"


def _model(verifier: str) -> str:
    return verifier.removeprefix(PREFIX)
