"""JSON lines always; the others when asked for, with a clear word when their package is missing."""

import json
import struct
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.training.trackers import Trackers

METRICS = {"loss": 0.5, "groups": 3, "note": "text", "age_histogram": {0: 2, 1: 1}}


def test_json_lines_hold_everything_and_are_appended(tmp_path: Path) -> None:
    for step in range(2):
        trackers = Trackers(tmp_path)
        trackers.log(step, METRICS)
        trackers.close()
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert lines[1]["note"] == "text"
    assert lines[1]["age_histogram"] == {"0": 2, "1": 1}


def test_wandb_gets_numbers_under_one_run_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda metrics, step: calls.append((step, metrics)), finish=lambda: calls.append("finish")
    )

    def init(**settings: Any) -> Any:
        calls.append(settings)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    trackers = Trackers(tmp_path, ["wandb"], run_name="mine", settings={"learning_rate": 1.0})
    trackers.log(4, METRICS)
    trackers.close()
    assert (calls[0]["id"], calls[0]["resume"], calls[0]["config"]) == ("mine", "allow", {"learning_rate": 1.0})
    assert calls[1] == (4, {"loss": 0.5, "groups": 3.0, "age_histogram/0": 2.0, "age_histogram/1": 1.0})
    assert calls[2] == "finish"


def test_a_missing_login_is_one_sentence_that_a_restart_does_not_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class UsageError(Exception):
        pass

    def init(**options: object) -> None:
        raise UsageError("api_key not configured (no-tty).\ncall wandb.login(key=[your_api_key])")

    fake = SimpleNamespace(init=init, errors=SimpleNamespace(Error=UsageError))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(
        ConfigError, match=r"cannot be used: api_key not configured .* `wandb login`, set WANDB_MODE=offline"
    ) as refused:
        Trackers(tmp_path, ["wandb"])
    assert refused.value.permanent
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("name", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        Trackers(tmp_path, [name])


def test_tensorboard_holds_every_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers(tmp_path, ["tensorboard"])
    for step in range(2):
        trackers.log(step, METRICS)
    trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "groups", "age_histogram/0", "age_histogram/1"}
    assert [(event.step, event.value) for event in events.Scalars("age_histogram/0")] == [(0, 2.0), (1, 2.0)]


@pytest.mark.slow
def test_wandb_records_offline_without_an_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    trackers = Trackers(tmp_path, ["wandb"], run_name="mine", settings={"learning_rate": 0.5})
    for step in range(2):
        trackers.log(step, METRICS | {"loss": float(step)})
    trackers.close()
    import_module("wandb").teardown()  # its own process writes the file, and may do so after the run is closed
    (recording,) = tmp_path.rglob("run-mine.wandb")
    assert wandb_column(recording.read_bytes(), "loss") == [0.0, 1.0]


def wandb_column(data: bytes, name: str) -> list[float]:
    """One logged quantity out of a recording: after 7 bytes of file header, records of CRC, length, type and a message."""
    from wandb.proto.wandb_internal_pb2 import Record

    values, place = [], 7
    while place + 7 <= len(data):
        _, size, _ = struct.unpack("<IHB", data[place : place + 7])
        record = Record.FromString(data[place + 7 : place + 7 + size])
        values += [float(item.value_json) for item in record.history.item if list(item.nested_key) == [name]]
        place += 7 + size
    return values
