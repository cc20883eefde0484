"""The reward: parts by weight, minus the length term: reward = Σ weight·part − α·|target − length|.

Without parts the task's own verifier is the whole task reward. `length` is the number of output tokens, the end-of-sequence token
included; a target of 0 means that no length was asked for. The answers of one submission share a budget: once it is spent, costly
verifiers do not run, and what they would have scored earns nothing.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from os import cpu_count
from threading import Lock

from shoal.config import TASK_PART
from shoal.errors import ConfigError
from shoal.tasks.task import Task, TaskSet
from shoal.tasks.verifiers.registry import Score, Verifier, as_part, find_verifier, score
from shoal.tasks.verifiers.reward_models import is_learned
from shoal.tasks.verifiers.text import LEFT_TO_MODEL


def length_penalty(target_length: int, length: int, alpha: float) -> float:
    """α·|target − length|, or 0 without a target."""
    return alpha * abs(target_length - length) if target_length else 0.0


def task_score(task: Task, text: str, parts: Mapping[str, float]) -> Score:
    """The weighted sum of the parts that can be verified; another one than the task finds its information in the metadata."""
    if not parts:
        return score(task, text)
    scores = {name: _part(task, text, name) for name in parts if not is_learned(name)}
    return Score(
        reward=sum(parts[name] * found.reward for name, found in scores.items()),
        why="; ".join(f"{name} {found.reward:g} ({found.why})" for name, found in scores.items()) or LEFT_TO_MODEL,
        exact=bool(scores) and all(found.exact for found in scores.values()),
        limited=any(found.limited for found in scores.values()),
        cost_s=sum(found.cost_s for found in scores.values()),
    )


def _part(task: Task, text: str, name: str) -> Score:
    if name == TASK_PART:
        return score(task, text)
    return score(as_part(task, name, task.metadata.get(name, {})), text)


OVER_BUDGET = Score(0.0, "not scored: the answers of the submission cost too much", exact=False, scored=False)
TOO_LATE = Score(0.0, "not scored: this machine was too slow", exact=False, limited=True, scored=False)


class ScoringBudget:
    """What scoring the answers of one submission may cost together: seconds of processor time, and seconds by the clock."""

    def __init__(self, cpu_s: float, wall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left_s, self._clock, self._deadline = cpu_s, clock, clock() + wall_s
        self._lock = Lock()

    @property
    def refusal(self) -> Score | None:
        """What a costly answer earns once the budget is spent."""
        if self._left_s <= 0:
            return OVER_BUDGET
        return TOO_LATE if self._clock() > self._deadline else None

    def spend(self, cpu_s: float) -> None:
        with self._lock:
            self._left_s -= cpu_s


def is_costly(task: Task, parts: Mapping[str, float]) -> bool:
    """Whether one answer to this task may take seconds to score."""
    return any(find_verifier(name).costly for name in _verifiers(task, parts))


def _verifiers(task: Task, parts: Mapping[str, float]) -> set[str]:
    own = {task.task_type} if not parts or TASK_PART in parts else set()
    return own | parts.keys() - {TASK_PART}


def score_all(
    pairs: Sequence[tuple[Task, str]], parts: Mapping[str, float] | None = None, budget: ScoringBudget | None = None
) -> list[Score]:
    """Every (task, completion), in order; verifiers that wait for other processes run side by side."""
    weights = parts or {}
    names = {name for task, _ in pairs for name in _verifiers(task, weights)}

    def scored(pair: tuple[Task, str]) -> Score:
        refusal = budget.refusal if budget and is_costly(pair[0], weights) else None
        found = refusal or task_score(*pair, weights)
        if budget:
            budget.spend(found.cost_s)
        return found

    side_by_side = any(find_verifier(name).slow for name in names)
    return list(_threads().map(scored, pairs) if side_by_side else map(scored, pairs))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cpu_count() or 1, thread_name_prefix="scoring")


def check_parts(tasks: TaskSet, parts: Mapping[str, float]) -> None:
    """Refuses parts without a verifier, and parts that some task has no information for."""
    verifiers = {name: _part_verifier(name) for name in parts if name != TASK_PART}
    for number, task in enumerate(tasks if verifiers else ()):
        for name, found in verifiers.items():
            if complaint := found.complaint(task.metadata.get(name, {})):
                place = f"task {number} ({task.problem_id})"
                raise ConfigError(f"reward.parts names {name}, but {place} has in its metadata: {complaint}.")


def _part_verifier(name: str) -> Verifier:
    try:
        return find_verifier(name)
    except ConfigError as error:
        raise ConfigError(f"reward.parts names {name}: {error.message}", hint=error.hint) from None
