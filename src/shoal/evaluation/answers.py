"""Answers of a policy, one row each: the prompt, the completion, its reward and why.

The parquet file is what `shoal eval` and `shoal curate` leave for others to read; a reader gets back exactly what was written.
Files are whole or absent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shoal.errors import ShoalError
from shoal.files import write_atomic
from shoal.protocol.verdicts import SOLVED

_TYPES: dict[str, Any] = {
    "problem_id": pa.string(),
    "category": pa.string(),
    "task_type": pa.string(),
    "sample": pa.int32(),
    "seed": pa.uint64(),
    "target_length": pa.int32(),
    "prompt_tokens": pa.list_(pa.int32()),
    "output_tokens": pa.list_(pa.int32()),
    "segment_lengths": pa.list_(pa.int32()),
    "completion": pa.string(),
    "finish_reason": pa.string(),
    "reward": pa.float64(),
    "why": pa.string(),
}
SCHEMA = pa.schema(list(_TYPES.items()))


class AnswersError(ShoalError):
    """A file that does not hold answers."""

    code = "answers"
    permanent = True


@dataclass(frozen=True)
class Answer:
    """`sample` counts the answers to one problem from 0; `reward` is the task reward, without any length term."""

    problem_id: str
    category: str
    task_type: str
    sample: int
    seed: int
    target_length: int
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    segment_lengths: Sequence[int]
    """Alternately sampled and given by an environment; a plain completion has one."""
    completion: str
    finish_reason: str
    reward: float
    why: str

    @property
    def solved(self) -> bool:
        return self.reward >= SOLVED


assert list(_TYPES) == [field.name for field in fields(Answer)]


def write_answers(path: Path, answers: Iterable[Answer]) -> None:
    table = pa.Table.from_pylist([asdict(answer) for answer in answers], schema=SCHEMA)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_atomic(path, sink.getvalue().to_pybytes())


def read_answers(path: Path) -> list[Answer]:
    try:
        table = pq.read_table(path, schema=SCHEMA)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise AnswersError(
            f"{path} holds no answers: {reason}", hint="`shoal eval --answers` writes such a file."
        ) from None
    return [Answer(**row) for row in table.to_pylist()]


def by_problem(answers: Iterable[Answer]) -> dict[str, list[Answer]]:
    """Answers of each problem in the order of its samples; problems in the order of their first answer."""
    problems: dict[str, list[Answer]] = {}
    for answer in answers:
        problems.setdefault(answer.problem_id, []).append(answer)
    return {name: sorted(found, key=lambda answer: answer.sample) for name, found in problems.items()}
