"""JSON lines always; the others when asked for, with a clear word when their package is missing."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.training.trackers import Trackers

FIGURES = {"loss": 0.5, "groups": 3, "note": "text", "age_histogram": {0: 2, 1: 1}}


def test_json_lines_hold_everything_and_are_appended(tmp_path: Path) -> None:
    for step in range(2):
        trackers = Trackers(tmp_path)
        trackers.log(step, FIGURES)
        trackers.close()
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert lines[1]["note"] == "text"
    assert lines[1]["age_histogram"] == {"0": 2, "1": 1}


def test_wandb_gets_numbers_under_one_run_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda figures, step: calls.append((step, figures)), finish=lambda: calls.append("finish")
    )

    def init(**settings: Any) -> Any:
        calls.append(settings)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    trackers = Trackers(tmp_path, ["wandb"], run_name="mine", settings={"learning_rate": 1.0})
    trackers.log(4, FIGURES)
    trackers.close()
    assert (calls[0]["id"], calls[0]["resume"], calls[0]["config"]) == ("mine", "allow", {"learning_rate": 1.0})
    assert calls[1] == (4, {"loss": 0.5, "groups": 3.0, "age_histogram/0": 2.0, "age_histogram/1": 1.0})
    assert calls[2] == "finish"


@pytest.mark.parametrize(("name", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        Trackers(tmp_path, [name])
