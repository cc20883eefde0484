"""Which demonstrations are worth learning, each refusal by its reason."""

import json
from pathlib import Path

import pytest

from shoal.curation import (
    Demonstration,
    FilterSettings,
    filter_demonstrations,
    read_demonstrations,
    write_demonstration,
)
from shoal.curation.demonstrations import compression, repetition
from shoal.errors import ConfigError
from shoal.policy import bundled_directory
from shoal.tasks import Task, TextCodec

TASK = Task(
    problem_id="1", source="s", task_type="integer_answer", prompt="Compute 2+2.", verification_info={"answer": 4}
)
LOOP = "so we try again and find that it fails because of the sign " * 30


def reason(completion: str, **settings: object) -> str:
    chosen = FilterSettings(**settings)  # type: ignore[arg-type]
    return next(why for _, why in filter_demonstrations([Demonstration(TASK, completion)], chosen))


@pytest.mark.parametrize(
    ("completion", "why"),
    [
        ("two and two make four</think>4", ""),
        ("two and two make four", "thinking not closed"),
        ("</think>4", "no thinking"),
        ("two and two make four</think>  ", "no answer"),
        ("two <think> and two</think>4", "think tags nested or repeated"),
        ("two and two</think>4</think>4", "think tags nested or repeated"),
        ("four</think>4", "too short"),
        ("two and two make five</think>5", "wrong answer"),
        (f"{LOOP}</think>4", "repetitive"),
    ],
)
def test_each_fault_has_its_reason(completion: str, why: str) -> None:
    assert reason(completion) == why


def test_filters_can_be_loosened() -> None:
    assert reason("two and two make five</think>5", correct=False) == ""
    assert reason(f"{LOOP}</think>4", max_repetition=1.0, max_compression=1e9) == ""
    assert reason("two and two make four</think>4", max_tokens=5) == "too long"


def test_length_is_counted_in_the_tokens_of_the_model() -> None:
    codec = TextCodec.from_directory(bundled_directory())
    text = "two and two make four</think>4"
    limit = len(codec.encode(text))
    for tokens, why in ((limit, ""), (limit - 1, "too long")):
        found = filter_demonstrations([Demonstration(TASK, text)], FilterSettings(max_tokens=tokens), codec)
        assert [one for _, one in found] == [why]


def test_a_second_solution_in_almost_the_same_words_is_dropped_and_another_way_is_kept() -> None:
    steps = " ".join(f"step{number} gives {number * 7}" for number in range(40))
    texts = [f"{steps} done</think>4", f"{steps} finished</think>4", "count two fingers and two more</think>4"]
    found = filter_demonstrations([Demonstration(TASK, text) for text in texts], FilterSettings())
    assert [why for _, why in found] == ["", "near duplicate", ""]


def test_prose_is_no_repetition_and_a_loop_is() -> None:
    prose = " ".join(f"word{number}" for number in range(200))
    assert repetition(prose) == 0.0
    assert repetition(LOOP) > 0.9
    assert compression(LOOP) > 12 > compression(prose)
    assert repetition("again again again") == 0.0


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    demonstration = Demonstration(TASK, "two and two</think>4", 30)
    path = tmp_path / "d.jsonl"
    path.write_text(write_demonstration(demonstration) + "\n\n")
    assert list(read_demonstrations(path)) == [demonstration]


def test_a_leading_think_tag_is_taken_off(tmp_path: Path) -> None:
    row = TASK.model_dump(mode="json") | {"completion": "\n<think>two and two</think>4"}
    (tmp_path / "d.jsonl").write_text(json.dumps(row))
    assert next(read_demonstrations(tmp_path / "d.jsonl")).completion == "two and two</think>4"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("no json", "d.jsonl:2 is no demonstration"),
        ('{"problem_id": "1"}', "d.jsonl:2 has no completion"),
        ('{"problem_id": "1", "completion": "x"}', "d.jsonl:2: source: field required"),
        ("[1]", "d.jsonl:2 is no demonstration"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    good = write_demonstration(Demonstration(TASK, "two</think>4"))
    (tmp_path / "d.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(ConfigError, match=words):
        list(read_demonstrations(tmp_path / "d.jsonl"))
