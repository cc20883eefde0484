"""The programs in the guides run as they are printed."""

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal.config import TasksConfig, TrainingConfig, load_config
from shoal.coordinator.rules.trust import LossRule
from shoal.tasks import Task, load_tasks, score
from shoal.training import TokenLoss
from shoal.training.objective.registry import find_function

GUIDE = Path(__file__).parents[2] / "docs" / "guide"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (GUIDE / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory from which modules can be imported, as PYTHONPATH=. makes one."""
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.startswith(("my_package", "my_recipe")):
            del sys.modules[name]


def test_the_verifier_of_the_guide_scores_the_task_of_the_guide(on_path: Path) -> None:
    (on_path / "my_package").mkdir()
    (on_path / "my_package" / "__init__.py").touch()
    (on_path / "my_package" / "poems.py").write_text(blocks("add-a-verifier.md", "python")[0])
    task = Task(problem_id="1", source="guide", **json.loads(blocks("add-a-verifier.md", "json")[0]))
    assert score(task, "</think>Fishes go with the flow").reward == 1.0
    assert score(task, "</think>Fishes go with the stream").reward == 0.0


def test_the_program_that_tries_a_verifier_prints_a_full_reward(capsys: pytest.CaptureFixture[str]) -> None:
    exec(blocks("add-a-verifier.md", "python")[1], {})
    assert "reward=1.0" in capsys.readouterr().out


def test_the_loss_of_the_guide_is_found_and_gives_one_value_per_token(on_path: Path) -> None:
    (on_path / "my_recipe.py").write_text(blocks("add-a-loss.md", "python")[0])
    builtin: dict[str, Callable[..., TokenLoss]] = {}
    loss = find_function("loss", "my_recipe:reinforce", builtin)
    batch = SimpleNamespace(advantages_N=torch.tensor([1.0, -2.0]), logprobs_N=torch.tensor([-0.5, -1.0]))
    result = loss(batch, TrainingConfig())
    assert isinstance(result, TokenLoss)
    assert result.loss_N.tolist() == [0.5, -2.0]


def test_the_run_file_of_the_guide_is_valid_and_cheating_would_not_pay(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(blocks("train-your-model.md", "toml")[0])
    config = load_config(tmp_path / "run.toml")
    assert config.model.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert LossRule.of(config).holds


def test_the_program_that_writes_tasks_writes_tasks_that_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": f"{number} apples?", "answer": f"Count.\n#### 1,00{number}"} for number in range(20)]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *names, split: rows))
    monkeypatch.chdir(tmp_path)
    exec(blocks("train-your-model.md", "python")[0], {})
    tasks = load_tasks(TasksConfig(source="gsm8k.jsonl", heldout=1)).train
    assert score(tasks[0], f"</think>So {tasks[0].verification_info['answer']}.").reward == 1.0


def test_the_multi_node_line_names_a_rendezvous_that_all_nodes_share() -> None:
    """tests/end_to_end/test_torchrun.py runs it with two launchers."""
    text = (GUIDE / "gpu-machines.md").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^torchrun --nnodes.*$", text, re.MULTILINE)
    words = shlex.split(line)
    assert {"--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500", "--rdzv-id=my-run"} <= set(words)
    assert words[-4:] == ["--no-python", "shoal", "train", "run.toml"]
