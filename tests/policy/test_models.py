import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shoal.policy import (
    ArchitectureError,
    ModelError,
    NotEnoughMemoryError,
    WireCopy,
    build_empty_model,
    build_model,
    load_weights,
    models,
    resolve_model,
)

Directory = Callable[..., Path]


@pytest.fixture
def copied(model_directory: Directory, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_directory("llama"), tmp_path / "model"))


def wire_as_file(model: nn.Module, path: Path) -> None:
    tensors = {
        wire.name: torch.frombuffer(bytearray(wire.data), dtype=torch.bfloat16).reshape(wire.shape)
        for wire in WireCopy(model).take()
    }
    save_file(tensors, path)


def test_a_directory_with_everything_is_itself(model_directory: Directory) -> None:
    assert resolve_model(str(model_directory("llama"))) == model_directory("llama")


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/model", "~/no/such/model", "a/b/c"])
def test_a_missing_directory_is_named(path: str) -> None:
    with pytest.raises(ModelError, match="There is no model directory"):
        resolve_model(path)


def test_a_model_that_is_not_here_cannot_be_fetched_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="no-such-owner/no-such-model") as refusal:
        resolve_model("no-such-owner/no-such-model")
    assert "HF_HUB_OFFLINE" in refusal.value.hint


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        ("model.safetensors", "holds no safetensors"),
        ("tokenizer.json", "tokenizer"),
        ("config.json", "no model directory"),
    ],
)
def test_an_incomplete_directory_is_refused(copied: Path, missing: str, why: str) -> None:
    (copied / missing).unlink()
    with pytest.raises(ModelError, match=why):
        resolve_model(str(copied))


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "no-such-model"}'])
def test_a_broken_config_is_refused(copied: Path, content: str) -> None:
    (copied / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        build_model(copied)


def test_a_tokenizer_of_another_model_is_refused(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "vocab_size": 60}))
    with pytest.raises(ModelError, match="64 tokens, the model 60"):
        resolve_model(str(copied))


def test_a_file_that_is_no_tokenizer_is_refused(copied: Path) -> None:
    (copied / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="is no tokenizer"):
        resolve_model(str(copied))


def test_weights_of_another_shape_do_not_build(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    with pytest.raises(ModelError):
        build_model(copied)


def test_an_unknown_dtype_is_refused(model_directory: Directory) -> None:
    with pytest.raises(ModelError, match="float32, bfloat16"):
        build_model(model_directory("llama"), dtype="int3")


def test_a_model_larger_than_memory_is_refused_with_the_plan(
    model_directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "available_bytes", lambda device: 1 << 16)
    with pytest.raises(NotEnoughMemoryError, match=r"weights .* MiB, staging .* MiB.*available 0 MiB"):
        build_empty_model(model_directory("llama"))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt-neox", "qwen3-moe"])
def test_published_weights_rebuild_the_policy(model_directory: Directory, tmp_path: Path, name: str) -> None:
    model = build_model(model_directory(name))
    wire_as_file(model, tmp_path / "model.safetensors")
    other = build_empty_model(model_directory(name))
    load_weights(other, tmp_path)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, other(ids).logits)


def test_tied_weights_travel_once_and_stay_tied(model_directory: Directory, tmp_path: Path) -> None:
    model = build_model(model_directory("llama"))
    names = [wire.name for wire in WireCopy(model).take()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    wire_as_file(model, tmp_path / "model.safetensors")
    other = build_empty_model(model_directory("llama"))
    load_weights(other, tmp_path)
    assert other.get_parameter("lm_head.weight") is other.get_parameter("model.embed_tokens.weight")


def test_published_names_are_those_of_the_checkpoint(model_directory: Directory) -> None:
    model = build_model(model_directory("qwen2"))
    assert {wire.name for wire in WireCopy(model).take()} == set(
        load_file(model_directory("qwen2") / "model.safetensors")
    )


@pytest.mark.parametrize("fault", ["missing", "extra", "shape"])
def test_weights_that_do_not_fit_change_nothing(copied: Path, fault: str) -> None:
    model = build_model(copied)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = {name: tensor + 1 for name, tensor in load_file(copied / "model.safetensors").items()}
    last = sorted(tensors)[-1]
    if fault == "missing":
        del tensors[last]
    elif fault == "extra":
        tensors["zzz.weight"] = torch.zeros(1)
    else:
        tensors[last] = torch.zeros(3, dtype=torch.bfloat16)
    save_file(tensors, copied / "model.safetensors")
    with pytest.raises(ArchitectureError):
        load_weights(model, copied)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_truncated_weights_file_is_refused(copied: Path) -> None:
    model = build_model(copied)
    data = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match="cannot be read"):
        load_weights(model, copied)
    with pytest.raises(ModelError):
        build_model(copied)
