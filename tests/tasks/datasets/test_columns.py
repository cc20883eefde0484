"""The columns of public datasets become tasks without code."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.config import TasksConfig
from shoal.tasks import Task, TaskSets, load_tasks, row_to_task
from tasks.rows import DEEPSCALER, INTELLECT_2, NUMINA_1_5, SYNTHETIC_1, integer_rows, write_jsonl


def everything(sets: TaskSets) -> list[Task]:
    return sorted([*sets.train, *sets.heldout], key=lambda task: task.problem_id)


def load(path: Path) -> list[Task]:
    return everything(load_tasks(TasksConfig(source=str(path)), cache=path.parent / "cache"))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        return write_jsonl(path, rows)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("form", ["set.jsonl", "set.parquet", "saved"])
def test_intellect_2_rows(tmp_path: Path, form: str) -> None:
    math, call, script = load(write(tmp_path / form, INTELLECT_2))
    assert (math.problem_id, math.task_type, math.solve_rate) == ("nm_1", "verifiable_math", 0.25)
    assert math.verification_info == {"ground_truth": "42"}
    assert call.verification_info["test_cases"]["fn_name"] == "double"
    assert script.solve_rate is None


def test_the_form_of_the_file_does_not_change_the_tasks(tmp_path: Path) -> None:
    sets = []
    for number, form in enumerate(("set.jsonl", "set.parquet", "set")):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = write(folder / form, INTELLECT_2)
        sets.append([(task.problem_id, task.prompt, task.verification_info) for task in load(path)])
    assert sets[0] == sets[1] == sets[2]


def test_numina_rows_without_a_verifiable_answer_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tasks = load(write(tmp_path / "numina.parquet", NUMINA_1_5))
    assert {(task.task_type, tuple(task.verification_info.values())) for task in tasks} == {
        ("verifiable_math", ("2",)),
        ("multiple_choice", ("B",)),
        ("verifiable_math", ("\\frac{1}{2}",)),
    }
    assert {task.source for task in tasks} == {"olympiads"}
    assert "3 rows of numina.parquet" in caplog.text


def test_deepscaler_is_one_json_array(tmp_path: Path) -> None:
    import json

    path = tmp_path / "deepscaler.json"
    path.write_text(json.dumps(DEEPSCALER))
    assert [task.verification_info["ground_truth"] for task in load(path)] == ["2", "\\sqrt{2}"]


def test_synthetic_1_rows_leave_out_what_only_a_model_can_score(tmp_path: Path) -> None:
    prediction, code = load(write(tmp_path / "synthetic.parquet", SYNTHETIC_1))
    assert (code.task_type, code.metadata["difficulty"]) == ("verifiable_code", "easy")
    assert prediction.task_type == "code_output_prediction"


def test_shoals_own_files_can_be_read_back(tmp_path: Path) -> None:
    sets = load_tasks(TasksConfig(source=str(write_jsonl(tmp_path / "a.jsonl", integer_rows(30)))), cache=tmp_path)
    sets.train.save(tmp_path / "again.arrow")
    again = load(tmp_path / "again.arrow")
    assert sorted(task.prompt for task in again) == sorted(task.prompt for task in sets.train)


def test_a_directory_gives_the_files_of_its_split(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train-00000.parquet", INTELLECT_2[:2])
    write(folder / "test-00000.parquet", INTELLECT_2[2:])
    assert {task.problem_id for task in load(folder)} == {"nm_1", "vcp_2"}


def test_other_columns_are_kept_as_metadata() -> None:
    task = row_to_task({"question": "2+2?", "answer": 4, "topic": "sums", "solution": "4"}, 3, "mine")
    assert task is not None
    assert (task.problem_id, task.metadata) == ("mine/3", {"topic": "sums"})
