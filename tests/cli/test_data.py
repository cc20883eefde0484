"""The data commands as somebody types them, on a policy that fits into a test."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cli import main as cli
from shoal.cli.asking_flags import Asking
from shoal.curation import Demonstration, write_demonstration
from shoal.evaluation import read_answers
from shoal.policy import resolve_model
from shoal.tasks import Task
from support.tiny_run import save_policy

Shoal = Callable[..., str]


@pytest.fixture
def shoal(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shoal:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return str(out) if ended.value.code == 0 else str(err)

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("data") / "model", seed=0)


def task(number: int) -> Task:
    return Task(
        problem_id=f"p{number}",
        source="hand",
        task_type="integer_answer",
        prompt=f"Compute {number}+1.",
        verification_info={"answer": number + 1},
        metadata={"category": "even" if number % 2 == 0 else "odd"},
    )


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(task(number).model_dump_json() + "\n" for number in range(10, 14)))
    return path


QUICK = ("--samples", 2, "--max-new-tokens", 6, "--threads", 1)


def test_eval_prints_metrics_by_category_and_leaves_every_answer(shoal: Shoal, model: Path, tasks: Path) -> None:
    out = shoal("eval", model, "--tasks", tasks, *QUICK, "--answers", "a.parquet", "--json", "f.json")
    assert "avg@2" in out
    assert "| even" in out
    assert len(read_answers(Path("a.parquet"))) == 8
    metrics = json.loads(Path("f.json").read_text())["policies"][0]["metrics"]
    assert [(row["category"], row["problems"]) for row in metrics] == [("all", 4), ("even", 2), ("odd", 2)]


def test_eval_goes_on_where_it_was_and_compares_two_policies(shoal: Shoal, model: Path, tasks: Path) -> None:
    shoal("eval", model, "--tasks", tasks, *QUICK, "--batch-tasks", 2)
    out = shoal("eval", model, "--tasks", tasks, *QUICK, "--batch-tasks", 2, "--against", model, "--json", "f.json")
    assert "2 of 2 batches were there already" in out
    assert "difference (95 %)" in out
    whole = json.loads(Path("f.json").read_text())["comparison"][0]
    assert (whole["difference"], whole["p_value"], whole["problems"]) == (0.0, 1.0, 4)


def test_curate_writes_what_it_kept_and_why_not_the_rest(shoal: Shoal, model: Path, tasks: Path) -> None:
    out = shoal("curate", tasks, "out", "--model", model, *QUICK, "--low", 0, "--evaluation", tasks)
    assert "No task is left to sample" in out
    out = shoal("curate", tasks, "out", "--model", model, *QUICK, "--low", 0)
    assert "kept 4 of 4 tasks" in out
    assert "0/2 " in out
    assert len(Path("out/tasks.jsonl").read_text().splitlines()) == 4
    assert "is empty" in shoal("curate", tasks, "x", "--model", model, "--low", 0.6)


def demonstrations(path: Path) -> Path:
    good = [
        Demonstration(task(number), f"{number} and one make {number + 1}</think>{number + 1}")
        for number in range(10, 18)
    ]
    bad = [Demonstration(task(20), "twenty and one make twenty</think>20"), Demonstration(task(21), "never closed")]
    path.write_text("".join(write_demonstration(one) + "\n" for one in [*good, *bad]))
    return path


def test_filter_tells_what_fell_to_which_filter(shoal: Shoal, model: Path, tmp_path: Path) -> None:
    out = shoal("filter", demonstrations(tmp_path / "d.jsonl"), "good.jsonl", "--model", model)
    assert "8 kept, 1 wrong answer, 1 thinking not closed" in out
    assert len(Path("good.jsonl").read_text().splitlines()) == 8


def test_sft_makes_a_policy_that_a_run_can_start_from(shoal: Shoal, model: Path, tmp_path: Path) -> None:
    command = ("sft", demonstrations(tmp_path / "d.jsonl"), "warm", "--model", model, "--batch", 4)
    out = shoal(*command)
    assert "step 2/2: loss" in out
    assert resolve_model("warm") == Path("warm")
    assert "is not empty" in shoal(*command)


def test_mistakes_are_one_sentence(shoal: Shoal, model: Path, tasks: Path) -> None:
    assert "There is no task source" in shoal("eval", model, "--tasks", "nowhere.jsonl")
    assert "is no list of lengths" in shoal("eval", model, "--tasks", tasks, "--target-lengths", "many")
    assert "is not one of 'torch', 'vllm'" in shoal("eval", model, "--tasks", tasks, "--engine", "steam")
    assert "neither answers nor a run" in shoal("reward-model", "train", "nowhere", "--out", "polite")


@pytest.mark.parametrize("command", [("eval", "bundled", "--tasks"), ("curate",)])
def test_ray_is_used_when_its_address_is_given(shoal: Shoal, tasks: Path, command: tuple[str, ...]) -> None:
    out = () if command[0] == "eval" else ("out",)
    assert "There is no Ray cluster at 127.0.0.1:1" in shoal(*command, tasks, *out, "--ray", "127.0.0.1:1", *QUICK)


RUN_FILE = """
[tasks]
system_prompt = "Be brief."
thinking = false
count = 20
heldout = 3
[rollouts]
temperature = 0.7
max_new_tokens = 5
[reward]
target_lengths = [4, 8]
"""


def test_eval_samples_as_a_run_does_and_flags_win(tmp_path: Path) -> None:
    run_file = tmp_path / "mine.toml"
    run_file.write_text(RUN_FILE)
    settings = Asking(run=str(run_file)).settings("seed")
    assert (settings.temperature, settings.max_new_tokens, settings.target_lengths) == (0.7, 5, (4, 8))
    assert (settings.style.system_prompt, settings.style.thinking) == ("Be brief.", False)
    chosen = Asking(run=str(run_file), temperature=1.0, target_lengths="none", thinking=True).settings("seed")
    assert (chosen.temperature, chosen.max_new_tokens, chosen.target_lengths) == (1.0, 5, ())
    assert (chosen.style.system_prompt, chosen.style.thinking) == ("Be brief.", True)
    plain = Asking().settings("seed")
    assert (plain.temperature, plain.max_new_tokens, plain.style.thinking) == (1.0, 4096, True)


def test_eval_of_a_run_measures_on_its_held_out_tasks(shoal: Shoal, model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(RUN_FILE)
    out = shoal("eval", model, "--run", "mine.toml", "--samples", 1, "--threads", 1)
    assert "3 tasks × 1 samples" in out
    assert "no list of lengths" in shoal("eval", model, "--run", "mine.toml", "--target-lengths", "4,x")
