"""Files under the names of the hub fill the module; a rank reads no more than its own experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from shoal.policy import build_model
from shoal.policy.architecture import meta_model
from shoal.policy.directory import read_config
from shoal.policy.models import build_shell
from shoal.policy.weights import unique_tensors
from shoal.training import World
from shoal.training.model.hub_names import convert, find_sources, makes_whole, stored_names
from shoal.training.model.sharding import load_own_rows
from support.tiny_models import save_model

from ..node import train_on_nodes

NAMES = ("llama", "qwen3-moe", "deepseek-v3", "gpt-neox", "gemma3")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(name, tmp_path_factory.mktemp(name)) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_reading_tensor_by_tensor_gives_what_transformers_loads(models: dict[str, Path], name: str) -> None:
    truth = unique_tensors(build_model(models[name]))
    model: Any = AutoModelForCausalLM.from_config(read_config(models[name]), dtype=torch.float32)
    for tensor in unique_tensors(model).values():
        tensor.data.fill_(7)
    load_own_rows(model, models[name], World())
    for tensor_name, tensor in unique_tensors(model).items():
        assert torch.equal(tensor, truth[tensor_name]), tensor_name


def test_the_files_of_a_moe_have_other_names_than_the_module(models: dict[str, Path]) -> None:
    names, skeleton = stored_names(models["qwen3-moe"]), meta_model(read_config(models["qwen3-moe"]))
    wanted = set(unique_tensors(skeleton))
    assert not wanted <= set(names)
    sources = find_sources(skeleton, list(names))
    assert makes_whole(skeleton, sources, wanted)
    missing = [name for name in names if "experts.1.up_proj" not in name and "q_proj" not in name]
    assert not makes_whole(skeleton, find_sources(skeleton, missing), wanted)


def test_a_rank_reads_its_own_experts_only(models: dict[str, Path]) -> None:
    """Every rank loaded the whole model."""
    directory = models["qwen3-moe"]
    names, skeleton = stored_names(directory), meta_model(read_config(directory))
    target = next(name for name in unique_tensors(skeleton) if name.endswith("experts.gate_up_proj"))
    source = find_sources(skeleton, list(names))[target]
    assert source.is_list_of_rows
    seen: list[str] = []

    def read(name: str) -> torch.Tensor:
        seen.append(name)
        with safe_open(names[name], "pt") as reader:
            tensor: torch.Tensor = reader.get_tensor(name)
        return tensor

    (made,) = convert(target, source, skeleton, read, slice(2, 4)).values()
    truth = unique_tensors(build_model(directory, "bfloat16"))[target]
    assert torch.equal(made, truth[2:4])
    assert {name.split(".experts.")[1].split(".")[0] for name in seen} == {"2", "3"}


@pytest.mark.parametrize("name", NAMES)
def test_a_shell_has_buffers_and_no_memory_for_parameters(models: dict[str, Path], name: str) -> None:
    shell, truth = build_shell(models[name]), build_model(models[name])
    assert all(parameter.is_meta for parameter in shell.parameters())
    assert list(unique_tensors(shell)) == list(unique_tensors(truth))
    buffers = dict(truth.named_buffers())
    for buffer_name, buffer in shell.named_buffers():
        assert torch.equal(buffer, buffers[buffer_name]), buffer_name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3", "gemma3"])
def test_two_ranks_that_read_by_rows_train_as_one_that_loads_all(
    models: dict[str, Path], name: str, tmp_path: Path
) -> None:
    (one,) = train_on_nodes(models[name], [tmp_path / "one"], 2)
    two, _ = train_on_nodes(models[name], [tmp_path / "two", tmp_path / "two"], 2)
    assert one.weights is not None
    assert two.weights is not None
    assert list(one.weights) == list(two.weights)
    for tensor_name, tensor in one.weights.items():
        torch.testing.assert_close(two.weights[tensor_name], tensor, atol=2e-5, rtol=1e-4)
