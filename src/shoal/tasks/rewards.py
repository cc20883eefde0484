"""The reward: parts by weight, minus the length term: reward = Σ weight·part − α·|target − length|.

Without parts the task's own verifier is the whole task reward. `length` is the number of output tokens, the end-of-sequence token
included; a target of 0 means that no length was asked for.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from os import cpu_count

from shoal.config import TASK_PART
from shoal.errors import ConfigError
from shoal.tasks.model import Task
from shoal.tasks.verifiers import Score, find_verifier, score


def length_penalty(target_length: int, length: int, alpha: float) -> float:
    """α·|target − length|, or 0 without a target."""
    return alpha * abs(target_length - length) if target_length else 0.0


def task_score(task: Task, text: str, parts: Mapping[str, float]) -> Score:
    """The weighted sum of the parts. A part other than the task itself finds what it needs in the task's metadata."""
    if not parts:
        return score(task, text)
    scores = {name: _part(task, text, name) for name in parts}
    return Score(
        reward=sum(parts[name] * found.reward for name, found in scores.items()),
        why="; ".join(f"{name} {found.reward:g} ({found.why})" for name, found in scores.items()),
        exact=all(found.exact for found in scores.values()),
        limited=any(found.limited for found in scores.values()),
    )


def _part(task: Task, text: str, name: str) -> Score:
    if name == TASK_PART:
        return score(task, text)
    return score(task.model_copy(update={"task_type": name, "verification_info": task.metadata.get(name, {})}), text)


def score_all(pairs: Sequence[tuple[Task, str]], parts: Mapping[str, float]) -> list[Score]:
    """Every completion of a slot; verifiers that wait for other processes run side by side."""
    if not any(find_verifier(task.task_type).slow for task, _ in pairs):
        return [task_score(task, text, parts) for task, text in pairs]
    return list(_threads().map(lambda pair: task_score(pair[0], pair[1], parts), pairs))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cpu_count() or 1, thread_name_prefix="scoring")


def check_parts(task: Task, parts: Mapping[str, float]) -> None:
    """Refuses parts that nobody knows or that this task has no information for."""
    for name in parts:
        complaint = "" if name == TASK_PART else find_verifier(name).complaint(task.metadata.get(name, {}))
        if complaint:
            raise ConfigError(f"reward.parts names {name}, but {task.problem_id} has in its metadata: {complaint}.")
