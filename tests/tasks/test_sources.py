from pathlib import Path
from typing import Any

import pytest

from shoal.config import TasksConfig
from shoal.errors import ConfigError, ShoalError
from shoal.tasks import TaskSets, load_tasks
from tasks.rows import integer_rows, write_jsonl


def load(path: Path, **settings: Any) -> TaskSets:
    return load_tasks(TasksConfig(source=str(path), **settings), cache=path.parent / "cache")


def test_a_jsonl_file_becomes_training_and_heldout_tasks(tmp_path: Path) -> None:
    sets = load(write_jsonl(tmp_path / "sums.jsonl", integer_rows(50)), heldout=3)
    assert (len(sets.train), len(sets.heldout)) == (47, 3)
    assert not {task.prompt for task in sets.train} & {task.prompt for task in sets.heldout}
    first = sets.train[0]
    assert (first.source, first.problem_id.split("/")[0]) == ("sums.jsonl", "sums.jsonl")


def test_the_order_of_the_file_is_kept(tmp_path: Path) -> None:
    sets = load(write_jsonl(tmp_path / "sums.jsonl", integer_rows(50)), heldout=3)
    answers = [task.verification_info["answer"] for task in sets.train]
    assert answers == sorted(answers)


def test_the_cache_gives_the_same_set_and_a_changed_file_another(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "sums.jsonl", integer_rows(50))
    first, again = load(path), load(path)
    assert first.train.digest == again.train.digest
    write_jsonl(path, integer_rows(51))
    assert load(path).train.digest != first.train.digest


def test_at_most_a_tenth_of_a_small_dataset_is_held_out(tmp_path: Path) -> None:
    assert len(load(write_jsonl(tmp_path / "sums.jsonl", integer_rows(40))).heldout) == 4


def test_equal_prompts_are_never_on_both_sides(tmp_path: Path) -> None:
    sets = load(write_jsonl(tmp_path / "twice.jsonl", integer_rows(30) * 2), heldout=5)
    assert not {task.prompt for task in sets.train} & {task.prompt for task in sets.heldout}
    assert len(sets.train) + len(sets.heldout) == 60


def test_another_seed_holds_out_other_tasks(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "sums.jsonl", integer_rows(200))
    heldout = [{task.prompt for task in load(path, heldout=10, seed=seed).heldout} for seed in (0, 1)]
    assert heldout[0] != heldout[1]


def test_count_takes_the_first_tasks(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "sums.jsonl", integer_rows(50))
    whole, part = load(path, heldout=2), load(path, heldout=2, count=10)
    assert [task.problem_id for task in part.train] == [task.problem_id for task in whole.train][:10]
    assert part.heldout.digest == whole.heldout.digest


def test_a_band_of_solve_rates_is_kept(tmp_path: Path) -> None:
    rows = [row | {"solve_rate": rate} for row, rate in zip(integer_rows(4), (0.0, 0.125, 0.5, 1.0), strict=True)]
    rows += [row | {"prompt": f"Unmeasured {number}"} for number, row in enumerate(integer_rows(2))]
    sets = load(write_jsonl(tmp_path / "rated.jsonl", rows), heldout=1, solve_rates=(0.125, 0.5))
    rates = [task.solve_rate for tasks in (sets.train, sets.heldout) for task in tasks]
    assert sorted(rate for rate in rates if rate is not None) == [0.125, 0.5]
    assert rates.count(None) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"task_type": "integer_answer", "prompt": "p", "verification_info": {"answer": "x"}}, r"Row 1 of bad\.jsonl"),
        ({"task_type": "integer_answer", "prompt": "p", "verification_info": {}}, r"verification_info\.answer"),
        ({"task_type": "integer_answer", "prompt": "p", "verification_info": "{"}, "not JSON"),
        ({"task_type": "integer_answer", "prompt": "p", "verification_info": "[]"}, "not a JSON object"),
        ({"task_type": "integer_answer", "prompt": "p"}, "neither verification_info nor answer"),
        ({"task_type": "integer_answer", "verification_info": {"answer": 1}}, "no text in prompt"),
        ({"task_type": "poetry", "prompt": "p", "verification_info": {}}, "no verifier for task type 'poetry'"),
        ({"task_type": "format", "prompt": "\ud800", "verification_info": {}}, "surrogates"),
        ({"task_type": "format", "prompt": "p", "verification_info": {}, "solve_rate": 2}, "solve_rate"),
    ],
)
def test_a_malformed_task_is_refused_with_its_row(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", [*integer_rows(1), row])
    with pytest.raises(ShoalError, match=message) as refusal:
        load(path)
    assert "Row 1 of bad.jsonl" in str(refusal.value)


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "p"')
    with pytest.raises(ConfigError, match="Line 1 of"):
        load(path)


def test_an_empty_file_and_an_absent_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="at least 2"):
        load(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match="no task source"):
        load(tmp_path / "absent.jsonl")
