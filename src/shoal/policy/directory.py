"""A model directory: config.json, safetensors and tokenizer files, found by name and checked before anything is built."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shoal.errors import ShoalError, first_line
from shoal.files import CONFIG_FILE, TOKENIZER_FILE

ADAPTER_CONFIG_FILE = "adapter_config.json"
"""What makes a directory a PEFT adapter."""


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
    """The directory of `bundled`, of a local path, or of a Hugging Face id (downloaded unless HF_HUB_OFFLINE is set).

    Of an adapter it is that of its base.
    """
    directory = _find(path)
    if is_adapter(directory):
        return resolve_model(base_of(directory))
    _check_directory(directory)
    return directory


def resolve_policy(path: str) -> Path:
    """The directory that a path names, of a whole model or of an adapter."""
    directory = _find(path)
    if not is_adapter(directory):
        _check_directory(directory)
    return directory


def resolve_adapter(path: str) -> Path | None:
    """The PEFT directory that a path names; None if it is a whole model."""
    directory = _find(path)
    return directory if is_adapter(directory) else None


def base_name(path: str) -> str:
    """The model that a path names, or the base of the adapter that it names."""
    adapter = resolve_adapter(path)
    return path if adapter is None else base_of(adapter)


def is_adapter(directory: Path) -> bool:
    return (directory / ADAPTER_CONFIG_FILE).is_file()


def base_of(adapter: Path) -> str:
    """The model that a PEFT directory names as its base; a relative path is also looked for beside the adapter."""
    base = str(_read_json(adapter / ADAPTER_CONFIG_FILE).get("base_model_name_or_path") or "")
    beside = (adapter / base).resolve()
    if base and not Path(base).expanduser().is_dir() and beside.is_dir():
        base = str(beside)
    if not base or (Path(base).expanduser().is_dir() and is_adapter(Path(base).expanduser())):
        raise ModelError(
            f"{adapter / ADAPTER_CONFIG_FILE} names no base model.",
            hint="Set its base_model_name_or_path to a model directory or a Hugging Face id.",
        )
    return base


def _find(path: str) -> Path:
    if path == "bundled":
        return bundled_directory()
    if Path(path).expanduser().is_dir():
        return Path(path).expanduser()
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ModelError(
            f"There is no model directory {path}.", hint="Give `bundled`, a directory or a Hugging Face id."
        )
    return _download(path)


def read_config(directory: Path) -> Any:
    """The Transformers config of a model directory."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    from shoal.frames.policy import register

    _read_json(directory / CONFIG_FILE)
    register()
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError, StrictDataclassError) as error:
        raise ModelError(f"{directory}/config.json is not understood: {first_line(error)}.") from error


def weight_files(directory: Path) -> list[Path]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{directory} holds no safetensors.",
            hint="Other weight formats are not read; save the model with `save_pretrained`, which writes safetensors.",
        )
    return files


Identity = tuple[tuple[str, int, int, int], ...]
"""Of the weight files of a directory."""


def weights_identity(directory: Path) -> Identity:
    """Content-addressed directories never change; any other is taken to have changed with its file."""
    files = [(file, file.stat()) for file in weight_files(directory)]
    return tuple((str(file.resolve()), stat.st_ino, stat.st_size, stat.st_mtime_ns) for file, stat in files)


def has_weights(directory: Path) -> bool:
    return any(directory.glob("*.safetensors"))


def check_vocabulary(tokens: Iterable[int], vocab_size: int) -> None:
    """Refuse a tokenizer that makes tokens which the model does not know."""
    outside = [token for token in tokens if not 0 <= token < vocab_size]
    if outside:
        raise ModelError(
            f"The tokenizer does not fit the model: its token {outside[0]} lies outside of the {vocab_size} "
            f"that the model knows.",
            hint="Use the tokenizer that the model was trained with.",
        )


def _download(model_id: str) -> Path:
    from huggingface_hub import snapshot_download

    offline = os.environ.get("HF_HUB_OFFLINE", "") in {"1", "true", "TRUE", "yes", "on"}
    patterns = ["*.safetensors", "*.json", "*.jinja"]
    try:
        return Path(snapshot_download(model_id, allow_patterns=patterns, local_files_only=offline))
    except Exception as error:  # the hub client raises many unrelated types: all mean that the model is not here
        hint = "HF_HUB_OFFLINE is set; unset it to download, or give a local directory." if offline else ""
        raise ModelError(f"The model {model_id} cannot be fetched: {first_line(error)}.", hint=hint) from error


def _check_directory(directory: Path) -> None:
    config = _read_json(directory / CONFIG_FILE)
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
        raise ModelError(f"{path} is no tokenizer: {first_line(error)}.") from error
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
        raise ModelError(f"{path} cannot be read: {first_line(error)}.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object.")
    return content


def some_names(names: list[str]) -> str:
    """The first three, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
