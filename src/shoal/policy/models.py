"""Policies at rest and in memory: find a model directory, build the module, publish and replace its weights.

A model directory holds config.json, safetensors and tokenizer files. Weights exist once: `load_weights` checks every name
and shape first and then copies into the live tensors, so a refused file changes nothing. On the wire a policy is bf16, each
tensor once, tied ones under the name that comes first.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor, nn

from shoal.broadcast import WireTensor
from shoal.errors import ShoalError
from shoal.policy.memory import available_bytes, check_weights

WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelError(ShoalError):
    """A model directory or a weights file that cannot be used."""

    code = "model"
    permanent = True


class ArchitectureError(ModelError):
    """Weights or a model of another shape than the engine can run."""

    code = "architecture"


def bundled_directory() -> Path:
    """The tiny policy inside the package."""
    return Path(__file__).parent / "bundled"


def resolve_model(path: str) -> Path:
    """The directory of `bundled`, of a local path, or of a Hugging Face id (downloaded unless HF_HUB_OFFLINE is set)."""
    if path == "bundled":
        directory = bundled_directory()
    elif Path(path).expanduser().is_dir():
        directory = Path(path).expanduser()
    elif path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ModelError(
            f"There is no model directory {path}.", hint="Give `bundled`, a directory or a Hugging Face id."
        )
    else:
        directory = _download(path)
    _check_directory(directory)
    return directory


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
        raise ModelError(f"The model in {directory} cannot be loaded: {_first_line(error)}.") from error
    if info["missing_keys"] or info["mismatched_keys"]:
        wrong = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
        raise ArchitectureError(f"The weights in {directory} do not fit its config.json: {_some(wrong)}.")
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


def wire_tensors(model: nn.Module) -> Iterator[WireTensor]:
    """Every tensor of the policy once, as bf16, in the order of the module; one at a time, so memory stays small."""
    for name, tensor in unique_tensors(model).items():
        bf16 = tensor.detach().to(device="cpu", dtype=torch.bfloat16).contiguous()
        data = bf16.view(torch.uint8).numpy().reshape(-1).data
        yield WireTensor(name=name, dtype="bfloat16", shape=tuple(tensor.shape), data=data)


def load_weights(model: nn.Module, directory: Path) -> None:
    """Copy the safetensors of `directory` into the live tensors; all names and shapes are checked before the first copy."""
    files = weight_files(directory)
    live = model.state_dict(keep_vars=True)
    wanted = unique_tensors(model)
    try:
        _check_headers(files, live, set(wanted), directory)
        with torch.no_grad():
            for file in files:
                with safe_open(file, framework="pt", device="cpu") as reader:
                    for name in reader.keys():  # noqa: SIM118 - not a mapping
                        if name in wanted:
                            wanted[name].copy_(reader.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"The weights in {directory} cannot be read: {_first_line(error)}.") from error


def check_vocabulary(tokens: Iterable[int], vocab_size: int) -> None:
    """Refuse a tokenizer that makes tokens which the model does not know."""
    outside = [token for token in tokens if not 0 <= token < vocab_size]
    if outside:
        raise ModelError(
            f"The tokenizer does not fit the model: its token {outside[0]} lies outside of the {vocab_size} "
            f"that the model knows.",
            hint="Use the tokenizer that the model was trained with.",
        )


def check_fit(model_files: Path, directory: Path) -> None:
    """Refuse weights in `directory` that are not exactly those of the model that `model_files` describes."""
    live = _meta_tensors(read_config(model_files), model_files)
    try:
        _check_headers(weight_files(directory), live, set(_unique(live)), directory)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"The weights in {directory} cannot be read: {_first_line(error)}.") from error


def check_memory(
    config: Any, directory: Path, dtype: str, device: str, *, cache_bytes: int | None = None, parts: int = 1
) -> None:
    """Refuse a model that does not fit; `cache_bytes` of engines that reserve them ahead, `parts` devices share the weights."""
    sizes = [tensor.numel() for tensor in _unique(_meta_tensors(config, directory)).values()]
    check_weights(
        weights_bytes=sum(sizes) * _dtype(dtype).itemsize // parts,
        staging_bytes=max(sizes) * torch.bfloat16.itemsize,
        available_bytes=available_bytes(torch.device(device)),
        what=f"the model in {directory}",
        cache_bytes=cache_bytes,
    )


def unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; of tied ones the first name only."""
    return _unique(model.state_dict(keep_vars=True))


def weight_files(directory: Path) -> list[Path]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{directory} holds no safetensors.",
            hint="Other weight formats are not read; save the model with `save_pretrained`, which writes safetensors.",
        )
    return files


def has_weights(directory: Path) -> bool:
    return any(directory.glob("*.safetensors"))


def tensor_bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in unique_tensors(model).values())


def _download(model_id: str) -> Path:
    from huggingface_hub import snapshot_download

    offline = os.environ.get("HF_HUB_OFFLINE", "") in {"1", "true", "TRUE", "yes", "on"}
    patterns = ["*.safetensors", "*.json", "*.jinja"]
    try:
        return Path(snapshot_download(model_id, allow_patterns=patterns, local_files_only=offline))
    except Exception as error:  # the hub client raises many unrelated types: all mean that the model is not here
        hint = "HF_HUB_OFFLINE is set; unset it to download, or give a local directory." if offline else ""
        raise ModelError(f"The model {model_id} cannot be fetched: {_first_line(error)}.", hint=hint) from error


def _check_directory(directory: Path) -> None:
    config = _read_json(directory / "config.json")
    weight_files(directory)
    tokenizer = directory / TOKENIZER_FILE
    if not tokenizer.is_file():
        raise ModelError(
            f"{directory} holds no {TOKENIZER_FILE}.",
            hint="Convert the tokenizer to the fast format: AutoTokenizer.from_pretrained(...).save_pretrained(...).",
        )
    _check_tokenizer(tokenizer, config)


def _check_tokenizer(path: Path, config: dict[str, Any]) -> None:
    try:
        # Some models have added tokens that they were never trained with, beyond their embedding; prompts are checked for them.
        tokens = Tokenizer.from_file(str(path)).get_vocab_size(with_added_tokens=False)
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"{path} is no tokenizer: {_first_line(error)}.") from error
    if tokens > config.get("vocab_size", tokens):
        raise ModelError(
            f"The tokenizer in {path.parent} has {tokens} tokens, the model {config['vocab_size']}: they do not belong together."
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{path.parent} is no model directory: it holds no {path.name}.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {_first_line(error)}.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object.")
    return content


def read_config(directory: Path) -> Any:
    """The Transformers config of a model directory."""
    from transformers import AutoConfig

    _read_json(directory / "config.json")
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ModelError(f"{directory}/config.json is not understood: {_first_line(error)}.") from error


def _unique(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    first_names = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if first_names[id(tensor)] == name}


def _meta_tensors(config: Any, directory: Path) -> dict[str, Tensor]:
    """Names and shapes of the model, without memory."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ModelError(
            f"{directory}/config.json describes no causal language model: {_first_line(error)}."
        ) from error
    return model.state_dict(keep_vars=True)


def _check_headers(files: list[Path], live: dict[str, Tensor], wanted: set[str], directory: Path) -> None:
    found: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as reader:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                _check_shape(name, tuple(reader.get_slice(name).get_shape()), live, directory)
                found.add(name)
    if missing := sorted(wanted - found):
        raise ArchitectureError(f"The weights in {directory} lack {_some(missing)}.")


def _check_shape(name: str, shape: tuple[int, ...], live: dict[str, Tensor], directory: Path) -> None:
    if name not in live:
        raise ArchitectureError(f"The weights in {directory} have {name}, which this model does not have.")
    if shape != tuple(live[name].shape):
        raise ArchitectureError(f"{name} in {directory} has shape {shape}; the model needs {tuple(live[name].shape)}.")


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ModelError(f"There is no compute dtype {name}.", hint=f"Choose one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def _ready(model: Any, device: str) -> nn.Module:
    module: nn.Module = model.to(device).eval()
    return module


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
