"""What a task is, and the ordered set that a task index points into.

Every side of a run builds the same `TaskSet` and compares its digest, so that index 17 means the same problem to worker,
validator and trainer. Tasks are immutable; the digest covers every field of every task, in order.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from blake3 import blake3
from pydantic import BaseModel, ConfigDict


class Task(BaseModel):
    """One problem; `task_type` names its verifier and `verification_info` is what that verifier needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    problem_id: str
    source: str
    task_type: str
    prompt: str
    verification_info: dict[str, Any]
    metadata: dict[str, Any] = {}


class TaskSet:
    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks = tuple(tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    @cached_property
    def digest(self) -> str:
        """64 hex digits over one JSON line per task, keys sorted."""
        hasher = blake3()
        for task in self._tasks:
            hasher.update(json.dumps(task.model_dump(), sort_keys=True, separators=(",", ":")).encode() + b"\n")
        return hasher.hexdigest()


@dataclass(frozen=True)
class TaskSets:
    """What training draws from, and what it never sees."""

    train: TaskSet
    heldout: TaskSet
