"""From one row of a dataset to a task, by the columns it has.

Known layouts: Shoal's own and GENESYS's (INTELLECT-2-RL-Dataset, SYNTHETIC-1: `prompt` with `verification_info`), and plain
question–answer tables (NuminaMath-1.5, DeepScaleR: `problem` with `answer`). A row that cannot become a task is refused with its
number; one that no verifier can score (a proof, an open answer) is skipped and counted.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from shoal.errors import ShoalError
from shoal.tasks.datasets.table import Row
from shoal.tasks.json_objects import as_object, parse_object
from shoal.tasks.task import Task, as_row
from shoal.tasks.verifiers.registry import find_verifier

MODEL_SCORED_TYPES = {"llm_judgeable_groundtruth_similarity", "swe_fixer", "verifiable_code_understanding_judge"}
"""Task types of public datasets whose answers only another model can score."""
NO_ANSWERS = {"", "proof", "notfound", "not found", "none"}
NAMED = {"problem_id", "source", "task_type", "prompt", "verification_info", "metadata", "solve_rate"}
RATE_PREFIX = "solve_rate"
PROMPT_COLUMNS = ("prompt", "problem", "question")
ID_COLUMNS = ("problem_id", "id", "task_id", "uuid")


class MalformedTaskError(ShoalError):
    """A row that cannot become a task."""

    code = "malformed_task"
    permanent = True


def row_to_task(fields: Mapping[str, Any], number: int, origin: str) -> Task | None:
    """The task in this row, or None for one that no verifier can score."""
    try:
        tree = _tree(fields, number, origin)
        if tree is None:
            return None
        task = Task.model_validate(tree)
        complaint = find_verifier(task.task_type).complaint(task.verification_info)
        _check_text(as_row(task))
    except ValidationError as error:
        first = error.errors()[0]
        complaint = f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
    except (ShoalError, ValueError) as error:
        complaint = str(error).rstrip(".")
    if complaint:
        raise MalformedTaskError(f"Row {number} of {origin} is not a task: {complaint}.")
    return task


def _check_text(row: Row) -> None:
    for value in row:
        if isinstance(value, str):
            value.encode()  # half a surrogate pair is no text


def _tree(fields: Mapping[str, Any], number: int, origin: str) -> dict[str, Any] | None:
    kind = _kind(fields)
    if kind is None:
        return None
    task_type, verification_info = kind
    return {
        "problem_id": str(_first(fields, ID_COLUMNS) or f"{origin}/{number}"),
        "source": str(fields.get("source") or origin),
        "task_type": task_type,
        "prompt": _prompt(fields),
        "verification_info": verification_info,
        "metadata": _metadata(fields),
        "solve_rate": _solve_rate(fields),
    }


def _kind(fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Task type and what its verifier needs."""
    if fields.get("verification_info") is not None:
        task_type = str(fields.get("task_type") or "")
        return None if task_type in MODEL_SCORED_TYPES else (task_type, _object(fields, "verification_info"))
    if "answer" not in fields:
        raise ValueError("it has neither verification_info nor answer")
    return _question_kind(fields, str(fields["answer"]).strip())


def _question_kind(fields: Mapping[str, Any], answer: str) -> tuple[str, dict[str, Any]] | None:
    valid = {str(fields.get(name) or "Yes").lower() for name in ("problem_is_valid", "solution_is_valid")}
    if answer.lower() in NO_ANSWERS or valid != {"yes"} or fields.get("question_type") == "proof":
        return None
    if fields.get("question_type") == "MCQ" and len(answer) == 1 and answer.isalpha():
        return "multiple_choice", {"answer": answer}
    return str(fields.get("task_type") or "verifiable_math"), {"ground_truth": answer}


def _prompt(fields: Mapping[str, Any]) -> str:
    prompt = _first(fields, PROMPT_COLUMNS)
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    raise ValueError(f"it has no text in {', '.join(PROMPT_COLUMNS)}")


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((fields[name] for name in names if fields.get(name) not in (None, "")), None)


def _object(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A JSON object, whether the column holds it or its text."""
    value = fields[name]
    found = parse_object(value, name) if isinstance(value, str) else as_object(value, name)
    return {key: inner for key, inner in found.items() if inner is not None}


def _metadata(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata column, and whatever other plain column the dataset has."""
    metadata = _object(fields, "metadata") if fields.get("metadata") else {}
    extra = {
        name: value
        for name, value in fields.items()
        if name not in NAMED and not name.startswith(RATE_PREFIX) and isinstance(value, str | int | float | bool)
    }
    used = {*PROMPT_COLUMNS, *ID_COLUMNS, "answer", "solution", "gold_standard_solution", "llm_response"}
    return {name: value for name, value in extra.items() if name not in used} | metadata


def _solve_rate(fields: Mapping[str, Any]) -> float | None:
    """`solve_rate`, or the first column of a name such as solve_rate_qwen_r1_distill_7b that holds a number."""
    for name in sorted(fields):
        if name.startswith(RATE_PREFIX) and fields[name] is not None:
            return float(fields[name])
    return None
