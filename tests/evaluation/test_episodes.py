"""`shoal eval` and `shoal curate` where tasks meet an environment: every answer is an episode."""

import json
from pathlib import Path

from typer.testing import CliRunner

from shoal.cli.main import app
from shoal.config import TasksConfig
from shoal.evaluation import AnswerGenerator, SamplingSettings
from shoal.evaluation.answers import read_answers, write_answers
from shoal.protocol.segments import split_segments
from shoal.tasks import Task, load_tasks

TASKS = list(load_tasks(TasksConfig(count=1, heldout=4)).heldout)
ECHO = "tasks.environments.own_environments:Echo"
SETTINGS = SamplingSettings(samples=2, max_new_tokens=160, environment=ECHO)


def test_an_episode_does_not_depend_on_the_company_it_is_asked_in(tiny_policy: Path, tmp_path: Path) -> None:
    generator = AnswerGenerator.load(str(tiny_policy), "torch", SETTINGS)
    together = {(one.problem_id, one.sample): one for one in generator.answer(TASKS)}
    apart = [one for task in reversed(TASKS) for one in generator.answer([task])]
    assert {(one.problem_id, one.sample): one for one in apart} == together
    assert any(len(one.segment_lengths) > 1 for one in apart)
    write_answers(tmp_path / "answers.parquet", apart)
    assert read_answers(tmp_path / "answers.parquet") == apart


def test_what_the_environment_gave_is_its_echo_and_its_rewards_are_added(tiny_policy: Path) -> None:
    generator = AnswerGenerator.load(str(tiny_policy), "torch", SETTINGS)
    for one in generator.answer(TASKS):
        assert sum(one.segment_lengths) == len(one.output_tokens)
        segments = split_segments(one.output_tokens, one.segment_lengths)
        for said, given in zip(segments[::2], segments[1::2], strict=False):
            echoed = generator.codec.answer_text(list(said), SETTINGS.style)
            assert echoed in generator.codec.decode_all(list(given))
        stepped = one.segment_lengths if one.finish_reason == "done" else one.segment_lengths[:-1]
        if one.finish_reason in ("done", "length"):
            assert one.reward == 0.25 * len(stepped[::2])


def test_a_task_that_names_its_environment_needs_no_setting(tiny_policy: Path) -> None:
    named = Task(problem_id="n", source="s", task_type=f"environment:{ECHO}", prompt="Say it.", verification_info={})
    generator = AnswerGenerator.load(str(tiny_policy), "torch", SamplingSettings(samples=2, max_new_tokens=160))
    assert {one.why.partition(" ")[0] for one in generator.answer([named])} == {ECHO}


def run(*words: str) -> str:
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_commands_play_episodes_with_a_flag(tiny_policy: Path, tmp_path: Path) -> None:
    asked = ["--environment", ECHO, "-k", "2", "--max-new-tokens", "120", "--threads", "1"]
    source = tmp_path / "tasks.jsonl"
    source.write_text("".join(f"{task.model_dump_json()}\n" for task in TASKS))
    answers = tmp_path / "answers.parquet"
    run(
        "eval",
        str(tiny_policy),
        "--tasks",
        str(source),
        "--dir",
        str(tmp_path / "e"),
        "--answers",
        str(answers),
        *asked,
    )
    assert any(len(one.segment_lengths) > 1 for one in read_answers(answers))
    run("curate", str(source), str(tmp_path / "curated"), "--model", str(tiny_policy), *asked)
    assert json.loads((tmp_path / "curated" / "curation.json").read_bytes())["tasks"] == len(TASKS)
