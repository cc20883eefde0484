"""Verifiers by task type: from a task and a completion to a reward that says why.

Each verifier is declared exact or tolerant. Exact means that every honest machine computes the same reward from the same text, so
that a differing claim proves cheating; a result that a limit of time or memory decided is never exact. A task type of the form
`module:function` names a verifier of the user's own.
"""

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError, model_validator

from shoal.errors import ConfigError
from shoal.tasks.task import Task
from shoal.tasks.verifiers import constraints, editing, gym, mathematics, programs
from shoal.tasks.verifiers import text as texts
from shoal.tasks.verifiers.reward_models import PREFIX, is_learned
from shoal.tasks.verifiers.text import Info, Outcome


@dataclass(frozen=True)
class Score:
    reward: float
    why: str
    exact: bool
    """A claim that differs from this reward proves cheating."""
    limited: bool = False
    """A limit of time or memory decided."""
    scored: bool = True
    """False if the answer was not looked at, because those before it had cost too much."""
    cost_s: float = field(default=0.0, compare=False)
    """Seconds of processor time that it took, here and in other processes."""


@dataclass(frozen=True)
class Verifier:
    verify: Callable[[Task, str], Outcome]
    """From a task and a completion to its outcome."""
    exact: bool
    info: type[Info] = Info
    """Shape of the `verification_info` of its tasks."""
    slow: bool = False
    """Runs in other processes: several at once are worth their threads."""
    sandboxed: bool = False
    """Runs model-written code, so bubblewrap is needed."""
    costly: bool = False
    """One answer may take seconds."""

    def complaint(self, verification_info: Mapping[str, Any]) -> str:
        """What is wrong with the information that a task carries; empty if nothing is."""
        try:
            self.info.model_validate(verification_info)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(["verification_info", *map(str, first["loc"])])
            return f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}"
        return ""


InfoT = TypeVar("InfoT", bound=Info)


def of_info(check: Callable[[InfoT, str], Outcome], info: type[InfoT], *, exact: bool, **kind: bool) -> Verifier:
    """A verifier that needs nothing of a task but its `verification_info`."""
    return Verifier(
        lambda task, text: check(info.model_validate(task.verification_info), text), exact=exact, info=info, **kind
    )


OwnFunction = Callable[[Task, str], Outcome | tuple[float, str]]


def verifier(*, exact: bool) -> Callable[[OwnFunction], OwnFunction]:
    """Marks a function `(task, completion_text) -> (reward, why)` as a verifier that tasks may name as `module:function`."""

    def mark(function: OwnFunction) -> OwnFunction:
        made = Verifier(lambda task, text: Outcome(*function(task, text)), exact=exact, costly=True)
        function.__shoal_verifier__ = made  # type: ignore[attr-defined]
        return function

    return mark


class PartInfo(Info):
    task_type: str
    verification_info: Annotated[dict[str, Any], Field(default_factory=dict)]
    weight: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _known(self) -> "PartInfo":
        if is_learned(self.task_type):
            raise ValueError(f"{self.task_type} ranks whole groups: name it in reward.parts")
        complaint = find_verifier(self.task_type).complaint(self.verification_info)
        if complaint:
            raise ValueError(complaint)
        return self


class MultiInfo(Info):
    parts: Annotated[tuple[PartInfo, ...], Field(min_length=1)]


def verify_parts(task: Task, text: str) -> Outcome:
    """The weighted mean of several verifiers on the same answer; exact where all of them are."""
    parts = MultiInfo.model_validate(task.verification_info).parts
    total, whys, limited, cost_s = 0.0, [], False, 0.0
    for part in parts:
        found = find_verifier(part.task_type)
        outcome = found.verify(as_part(task, part.task_type, part.verification_info), text)
        total += part.weight * outcome.reward
        whys.append(f"{part.task_type} {outcome.reward:g} ({outcome.why})")
        limited = limited or outcome.limited or not found.exact
        cost_s += outcome.cost_s
    return Outcome(total / sum(part.weight for part in parts), "; ".join(whys), limited, cost_s)


def as_part(task: Task, task_type: str, verification_info: Mapping[str, Any]) -> Task:
    """The same task for another verifier."""
    return task.model_copy(update={"task_type": task_type, "verification_info": verification_info})


_exact = partial(of_info, exact=True)
_LEARNED = of_info(texts.check_learned, Info, exact=False)
_CODE = of_info(programs.check_code, programs.CodeInfo, exact=False, slow=True, sandboxed=True, costly=True)

_BY_ENVIRONMENT = of_info(texts.check_by_environment, Info, exact=False)
ENVIRONMENT_PREFIX = "environment:"
"""A task of type `environment:NAME` is an episode, which that environment scores."""

VERIFIERS: dict[str, Verifier] = {
    "integer_answer": _exact(texts.check_integer, texts.IntegerInfo),
    "last_number": _exact(texts.check_last_number, texts.IntegerInfo),
    "exact_match": _exact(texts.check_exact, texts.ExactInfo),
    "multiple_choice": _exact(texts.check_choice, texts.ChoiceInfo),
    "format": _exact(texts.check_format, texts.FormatInfo),
    "json_output": _exact(texts.check_json, texts.JsonInfo),
    "code_output_prediction": _exact(texts.check_json, texts.JsonInfo),
    "instruction_following": _exact(constraints.check_constraints, constraints.ConstraintInfo),
    "editing": _exact(editing.check_editing, editing.EditingInfo),
    "verifiable_math": of_info(mathematics.check_math, mathematics.MathInfo, exact=False, costly=True),
    "verifiable_code": _CODE,
    "prime_rl_code": _CODE,
    gym.TASK_TYPE: of_info(gym.check_gym, gym.GymInfo, exact=False, slow=True, costly=True),
    "multi": Verifier(verify_parts, exact=True, info=MultiInfo, slow=True, costly=True),
}


def register(task_type: str, made: Verifier) -> None:
    """Adds a verifier under a name of its own, for this process."""
    if VERIFIERS.setdefault(task_type, made) is not made:
        raise ConfigError(f"There already is a verifier for task type {task_type!r}.")


def score(task: Task, completion_text: str) -> Score:
    found, started = find_verifier(task.task_type), time.thread_time()
    outcome = found.verify(task, completion_text)
    cost_s = outcome.cost_s + time.thread_time() - started
    return Score(outcome.reward, outcome.why, found.exact and not outcome.limited, outcome.limited, cost_s=cost_s)


def is_exact(task_type: str) -> bool:
    return find_verifier(task_type).exact


def is_own(task_type: str) -> bool:
    return ":" in task_type and not is_learned(task_type) and not task_type.startswith(ENVIRONMENT_PREFIX)


def find_verifier(task_type: str) -> Verifier:
    if task_type in VERIFIERS:
        return VERIFIERS[task_type]
    if is_learned(task_type):
        return _LEARNED
    if task_type.startswith(ENVIRONMENT_PREFIX):
        return _BY_ENVIRONMENT
    if is_own(task_type):
        return _import(task_type)
    known = ", ".join(sorted(VERIFIERS))
    raise ConfigError(
        f"There is no verifier for task type {task_type!r}.",
        hint=f"Known: {known}, {PREFIX}NAME, or your own as module:function.",
    )


def _import(task_type: str) -> Verifier:
    module_name, _, name = task_type.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"The verifier {task_type} cannot be imported: {error}.",
            hint="Install the module that the owner names, or add its folder to PYTHONPATH.",
        ) from None
    made = getattr(function, "__shoal_verifier__", None)
    if not isinstance(made, Verifier):
        raise ConfigError(f"{task_type} is not a verifier.", hint="Mark it with @shoal.tasks.verifier(exact=…).")
    return made
