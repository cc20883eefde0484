from pathlib import Path

import pytest

from shoal.evaluation import AnswersError, read_answers, write_answers
from shoal.evaluation.answers import by_problem
from support.answers import answer


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    answers = [answer("a", 0, 1.0), answer("a", 1, 0.25, completion="ünïcode\n\x00"), answer("b", 0, 0.0)]
    write_answers(tmp_path / "answers.parquet", answers)
    assert read_answers(tmp_path / "answers.parquet") == answers


def test_a_file_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(AnswersError, match="holds no answers"):
        read_answers(path)
    with pytest.raises(AnswersError, match="holds no answers"):
        read_answers(tmp_path / "nowhere.parquet")


def test_answers_of_a_problem_are_in_the_order_of_its_samples() -> None:
    grouped = by_problem([answer("b", 1, 0.0), answer("a", 0, 0.0), answer("b", 0, 0.0)])
    assert {name: [one.sample for one in found] for name, found in grouped.items()} == {"b": [0, 1], "a": [0]}
