"""Builds the module of a model directory, with its weights or without, after checking that it fits into memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from shoal.errors import first_line
from shoal.policy.architecture import meta_model
from shoal.policy.directory import ArchitectureError, ModelError, read_config, some_names, weight_files
from shoal.policy.memory import available_bytes, check_weights
from shoal.policy.weights import unique_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_model(directory: Path, dtype: str = "float32", device: str = "cpu") -> nn.Module:
    """The causal LM of a model directory with its weights, in eval mode; every parameter must be in the files."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # roles write logs, not bars
    config = read_config(directory)
    weight_files(directory)
    check_memory(config, directory, dtype, device)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=_dtype(dtype), local_files_only=True, output_loading_info=True
        )
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"The model in {directory} cannot be loaded: {first_line(error)}.") from error
    if info["missing_keys"] or info["mismatched_keys"]:
        wrong = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
        raise ArchitectureError(f"The weights in {directory} do not fit its config.json: {some_names(wrong)}.")
    return _ready(model, device)


def build_empty_model(directory: Path, dtype: str = "float32", device: str = "cpu") -> nn.Module:
    """The module that config.json describes, its parameters not yet set: `load_weights` must follow."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = read_config(directory)
    check_memory(config, directory, dtype, device)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=_dtype(dtype))
    model.tie_weights()
    return _ready(model, device)


def build_shell(directory: Path, dtype: str = "float32") -> nn.Module:
    """The module that config.json describes, in eval mode: buffers are there, parameters have no memory until they are placed."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights(), _parameters_without_memory():
        model: Any = AutoModelForCausalLM.from_config(read_config(directory), dtype=_dtype(dtype))
    model.tie_weights()
    shell: nn.Module = model.eval()
    return shell


def build_narrow_model(directory: Path, dtype: str, device: str = "cpu") -> nn.Module:
    """A model that computes in float32 with matrices in a narrower type, all parameters not yet set: `load_weights` must follow.

    Everything else, buffers included, is as in a float32 model.
    """
    check_memory(read_config(directory), directory, dtype, device)
    model = build_shell(directory)
    placed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, shell in list(module.named_parameters(recurse=False)):
            if id(shell) not in placed:
                own = _dtype(dtype) if shell.dim() >= 2 else torch.float32
                placed[id(shell)] = nn.Parameter(
                    torch.empty(shell.shape, dtype=own, device=device), requires_grad=False
                )
            setattr(module, name, placed[id(shell)])
    return _ready(model, device)


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Modules made inside hold one parameter at a time. Buffers stay: rotary frequencies are in no file."""
    register = nn.Module.register_parameter

    def register_shell(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_shell  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def check_memory(
    config: Any, directory: Path, dtype: str, device: str, *, cache_bytes: int | None = None, parts: int = 1
) -> None:
    """Refuse a model that does not fit; `cache_bytes` of engines that reserve them ahead, `parts` devices share the weights."""
    sizes = [tensor.numel() for tensor in unique_tensors(meta_model(config)).values()]
    check_weights(
        weights_bytes=sum(sizes) * _dtype(dtype).itemsize // parts,
        staging_bytes=max(sizes) * torch.bfloat16.itemsize,
        available_bytes=available_bytes(torch.device(device)),
        what=f"the model in {directory}",
        cache_bytes=cache_bytes,
    )


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ModelError(f"There is no compute dtype {name}.", hint=f"Choose one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def _ready(model: Any, device: str) -> nn.Module:
    module: nn.Module = model.to(device).eval()
    return module
