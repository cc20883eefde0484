"""Verifiers by task type: from a task and a completion to a reward that says why.

Each verifier is declared exact or tolerant. Exact means that every honest machine computes the same reward from the same text, so
that a differing claim proves cheating; a verdict that a limit of time or memory decided is never exact. A task type of the form
`module:function` names a verifier of the user's own.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from shoal.errors import ConfigError
from shoal.tasks.task import Task
from shoal.tasks.verifiers import constraints, gym, mathematics, programs
from shoal.tasks.verifiers import text as checks
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


@dataclass(frozen=True)
class Verifier:
    check: Callable[[Any, str], Outcome]
    """From the parsed `verification_info` and the completion to what it is worth."""
    info: type[Info]
    exact: bool
    slow: bool = False
    """Runs in other processes: several at once are worth their threads."""
    sandboxed: bool = False
    """Runs model-written code, so bubblewrap is needed."""

    def judge(self, task: Task, text: str) -> Outcome:
        return self.check(self.info.model_validate(task.verification_info), text)

    def complaint(self, verification_info: Mapping[str, Any]) -> str:
        """What is wrong with the information that a task carries; empty if nothing is."""
        try:
            self.info.model_validate(verification_info)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(["verification_info", *map(str, first["loc"])])
            return f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}"
        return ""


OwnCheck = Callable[[Task, str], Outcome | tuple[float, str]]


@dataclass(frozen=True)
class OwnVerifier(Verifier):
    """A user's own function: it gets the whole task and answers with (reward, why)."""

    function: OwnCheck | None = None

    def judge(self, task: Task, text: str) -> Outcome:
        assert self.function is not None
        return Outcome(*self.function(task, text))


def verifier(*, exact: bool) -> Callable[[OwnCheck], OwnCheck]:
    """Marks a function `(task, completion_text) -> (reward, why)` as a verifier that tasks may name as `module:function`."""

    def mark(function: OwnCheck) -> OwnCheck:
        made = OwnVerifier(_never, Info, exact, function=function)
        function.__shoal_verifier__ = made  # type: ignore[attr-defined]
        return function

    return mark


def _never(info: Info, text: str) -> Outcome:
    raise AssertionError("own verifiers judge whole tasks")


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


def check_multi(info: MultiInfo, text: str) -> Outcome:
    """The weighted mean of several verifiers on the same answer; exact where all of them are."""
    total, whys, limited = 0.0, [], False
    for part in info.parts:
        found = find_verifier(part.task_type)
        outcome = found.check(found.info.model_validate(part.verification_info), text)
        total += part.weight * outcome.reward
        whys.append(f"{part.task_type} {outcome.reward:g} ({outcome.why})")
        limited = limited or outcome.limited or not found.exact
    return Outcome(total / sum(part.weight for part in info.parts), "; ".join(whys), limited)


_MATH = Verifier(mathematics.check_math, mathematics.MathInfo, exact=False, slow=True)
_LEARNED = Verifier(checks.check_learned, Info, exact=False)
_CODE = Verifier(programs.check_code, programs.CodeInfo, exact=False, slow=True, sandboxed=True)

VERIFIERS: dict[str, Verifier] = {
    "integer_answer": Verifier(checks.check_integer, checks.IntegerInfo, exact=True),
    "last_number": Verifier(checks.check_last_number, checks.IntegerInfo, exact=True),
    "exact_match": Verifier(checks.check_exact, checks.ExactInfo, exact=True),
    "multiple_choice": Verifier(checks.check_choice, checks.ChoiceInfo, exact=True),
    "format": Verifier(checks.check_format, checks.FormatInfo, exact=True),
    "json_output": Verifier(checks.check_json, checks.JsonInfo, exact=True),
    "code_output_prediction": Verifier(checks.check_json, checks.JsonInfo, exact=True),
    "instruction_following": Verifier(constraints.check_constraints, constraints.ConstraintInfo, exact=True),
    "verifiable_math": _MATH,
    "verifiable_code": _CODE,
    "prime_rl_code": _CODE,
    gym.TASK_TYPE: Verifier(gym.check_gym, gym.GymInfo, exact=False, slow=True),
    "multi": Verifier(check_multi, MultiInfo, exact=True, slow=True),
}


def register(task_type: str, made: Verifier) -> None:
    """Adds a verifier under a name of its own, for this process."""
    if VERIFIERS.setdefault(task_type, made) is not made:
        raise ConfigError(f"There already is a verifier for task type {task_type!r}.")


def score(task: Task, completion_text: str) -> Score:
    found = find_verifier(task.task_type)
    outcome = found.judge(task, completion_text)
    return Score(outcome.reward, outcome.why, found.exact and not outcome.limited, outcome.limited)


def is_exact(task_type: str) -> bool:
    return find_verifier(task_type).exact


def is_own(task_type: str) -> bool:
    return ":" in task_type and not is_learned(task_type)


def find_verifier(task_type: str) -> Verifier:
    if task_type in VERIFIERS:
        return VERIFIERS[task_type]
    if is_learned(task_type):
        return _LEARNED
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
            f"The verifier {task_type} cannot be imported: {error}.", hint="Install the module that the owner names."
        ) from None
    made = getattr(function, "__shoal_verifier__", None)
    if not isinstance(made, Verifier):
        raise ConfigError(f"{task_type} is not a verifier.", hint="Mark it with @shoal.tasks.verifier(exact=…).")
    return made
