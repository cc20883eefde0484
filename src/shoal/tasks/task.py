"""What a task is, and the ordered set that a task index points into.

Every side of a run holds the same `TaskSet` and compares its digest, so that index 17 means the same problem to worker,
validator and trainer. Tasks are immutable; the digest covers every field of every task, in order. A set is a table, in memory
or mapped from a file; a task is made when it is asked for.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field

from shoal.tasks.datasets.table import SCHEMA, Row, digest_table, make_table, open_table, write_table


class Task(BaseModel):
    """One problem; `task_type` names its verifier and `verification_info` is what that verifier needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    problem_id: str
    source: str
    task_type: str
    prompt: str
    verification_info: dict[str, Any]
    metadata: dict[str, Any] = {}
    solve_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of right answers of some model, where it was measured."""


class TaskSet:
    def __init__(self, tasks: Iterable[Task] = ()) -> None:
        self.table: pa.Table = make_table(as_row(task) for task in tasks)

    @classmethod
    def of_table(cls, table: pa.Table) -> "TaskSet":
        tasks = cls()
        tasks.table = table
        return tasks

    @classmethod
    def open(cls, path: Path) -> "TaskSet":
        """A set that stays on disk: only what is read takes memory."""
        return cls.of_table(open_table(path))

    def save(self, path: Path) -> None:
        write_table(path, self.table.to_batches())

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Task:
        if not -len(self) <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        return _as_task(tuple(column[index].as_py() for column in self._columns))

    @cached_property
    def _columns(self) -> list[pa.ChunkedArray]:
        return [self.table.column(field.name) for field in SCHEMA]

    def __iter__(self) -> Iterator[Task]:
        for batch in self.table.to_batches():
            yield from map(_as_task, zip(*(column.to_pylist() for column in batch.columns), strict=True))

    def longest(self, count: int) -> list[Task]:
        """The tasks with the longest prompts, by letters."""
        lengths = pc.utf8_length(self.table.column("prompt"))
        order = pc.select_k_unstable(pa.table({"length": lengths}), min(count, len(self)), [("length", "descending")])
        return [self[index] for index in order.to_pylist()]

    @cached_property
    def digest(self) -> str:
        """64 hex digits over all tasks in order."""
        return digest_table(self.table)

    @cached_property
    def task_types(self) -> tuple[str, ...]:
        """Every task type that occurs, sorted."""
        return tuple(sorted(self.table.column("task_type").unique().to_pylist()))


@dataclass(frozen=True)
class TaskSets:
    """What training samples from, and what it never sees."""

    train: TaskSet
    heldout: TaskSet


def as_row(task: Task) -> Row:
    return (
        task.problem_id,
        task.source,
        task.task_type,
        task.prompt,
        canonical_json(task.verification_info),
        canonical_json(task.metadata),
        task.solve_rate,
    )


def canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _as_task(row: tuple[Any, ...]) -> Task:
    problem_id, source, task_type, prompt, verification_info, metadata, solve_rate = row
    return Task.model_construct(
        problem_id=problem_id,
        source=source,
        task_type=task_type,
        prompt=prompt,
        verification_info=json.loads(verification_info),
        metadata=json.loads(metadata),
        solve_rate=solve_rate,
    )
