"""An adapter as a PEFT directory, and its factors in any safetensors: read, checked, written.

Names are PEFT's: `base_model.model.PATH.lora_A.weight` of [rank, inputs] and `….lora_B.weight` of [outputs, rank]. What
PEFT can and Shoal cannot (other scalings, trained biases, ranks that differ by layer) is refused by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.config import LoraConfig
from shoal.errors import first_line
from shoal.files import write_atomic
from shoal.policy.directory import ADAPTER_CONFIG_FILE, ModelError, some_names, weight_files
from shoal.policy.lora.layers import Factors, adapted_layers
from shoal.policy.lora.targets import LoraError

WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."
BASE_DIGEST = "base_weights_digest"
"""In the metadata of the safetensors: PEFT's own config has no place for it."""
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
    "exclude_modules": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # the others begin by changing the base
}
"""What Shoal computes; absent means plain."""
_PEFT_NAMES = {"rank": "r", "alpha": "lora_alpha", "target_modules": "target_modules"}


def read_settings(directory: Path) -> LoraConfig:
    """Rank, alpha and targets of a PEFT directory."""
    path = directory / ADAPTER_CONFIG_FILE
    try:
        content = json.loads(path.read_text())
        lora = LoraConfig(
            rank=content["r"], alpha=content["lora_alpha"], target_modules=_targets(content["target_modules"])
        )
    except ValidationError as error:
        wrong = error.errors()[0]
        field = _PEFT_NAMES[str(wrong["loc"][0])]
        raise LoraError(f"{path} sets {field} to {wrong['input']!r}: {wrong['msg']}.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoraError(f"{path} is no adapter config of LoRA: {first_line(error)}.") from None
    if lora.rank == 0:
        raise LoraError(f"{path} has rank 0: it adapts nothing.")
    for name, plain in _PLAIN.items():
        if name in content and content[name] not in plain:
            raise LoraError(
                f"{path} sets {name} to {content[name]!r}, which Shoal does not compute.",
                hint="Merge that adapter into its base with PEFT, and start from the merged model.",
            )
    return lora


def _targets(value: object) -> tuple[str, ...]:
    if value == "all-linear":
        return ()
    if not isinstance(value, list):
        raise ValueError("target_modules is no list of names")
    return tuple(sorted(map(str, value)))


def factor_shapes(model: nn.Module, names: list[str], rank: int) -> dict[str, tuple[int, int]]:
    """Every tensor of an adapter of these layers."""
    shapes: dict[str, tuple[int, int]] = {}
    for name in names:
        layer: Any = model.get_submodule(name)
        shapes[factor_name(name, "A")] = (rank, layer.in_features)
        shapes[factor_name(name, "B")] = (layer.out_features, rank)
    return shapes


def factor_name(layer: str, factor: str) -> str:
    return f"{PREFIX}{layer}.lora_{factor}.weight"


def trained_factors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of the adapter that a model trains, by PEFT's names; none if it trains no adapter."""
    factors: dict[str, Tensor] = {}
    for name, layer in adapted_layers(model).items():
        if layer.lora_A is not None and layer.lora_B is not None:
            factors[factor_name(name, "A")], factors[factor_name(name, "B")] = layer.lora_A.weight, layer.lora_B.weight
    return factors


def read_factors(directory: Path, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    """The factors in the safetensors of a directory as float32; anything but exactly these tensors is refused."""
    found: dict[str, Tensor] = {}
    try:
        for file in weight_files(directory):
            with safe_open(file, framework="pt", device="cpu") as reader:
                for name in reader.keys():  # noqa: SIM118 - not a mapping
                    _check_shape(directory, name, tuple(reader.get_slice(name).get_shape()), shapes)
                    found[name] = reader.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"The adapter in {directory} cannot be read: {first_line(error)}.") from error
    if missing := sorted(shapes.keys() - found):
        raise LoraError(f"The adapter in {directory} lacks {some_names(missing)}.")
    if wrong := sorted(name for name, tensor in found.items() if not tensor.is_floating_point()):
        raise LoraError(f"The adapter in {directory} has no floating-point numbers in {some_names(wrong)}.")
    if wrong := sorted(name for name, tensor in found.items() if not tensor.isfinite().all()):
        raise LoraError(f"The adapter in {directory} has numbers that are not finite in {some_names(wrong)}.")
    return {name: tensor.float() for name, tensor in found.items()}


def _check_shape(directory: Path, name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, int]]) -> None:
    wanted = shapes.get(name)
    if wanted is None:
        raise LoraError(
            f"The adapter in {directory} has {name}, which is no factor of an adapted layer.",
            hint="It belongs to another model or to other model.lora.target_modules.",
        )
    if shape != wanted:
        rank = "A" if name.endswith("lora_A.weight") else "B"
        own = shape[0 if rank == "A" else -1] if shape else 0
        raise LoraError(
            f"{name} in {directory} has shape {shape}; the run needs {wanted}.",
            hint=f"Its rank is {own}; model.lora.rank must be the same." if own not in wanted else "",
        )


def as_factors(tensors: Mapping[str, Tensor], names: list[str], scale: float) -> dict[str, Factors]:
    return {name: Factors(tensors[factor_name(name, "A")], tensors[factor_name(name, "B")], scale) for name in names}


def base_digest_of(directory: Path) -> str:
    """Digest of the base that the adapter was trained on, if its file says so."""
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as reader:
            return str((reader.metadata() or {}).get(BASE_DIGEST, ""))
    return ""


def write_adapter(
    directory: Path, tensors: Mapping[str, Tensor], lora: LoraConfig, *, base: str, base_digest: str = ""
) -> None:
    """A PEFT directory of factors by PEFT's names; those say which layers are adapted."""
    directory.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt"} | ({BASE_DIGEST: base_digest} if base_digest else {})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / WEIGHTS_NAME, metadata)
    layers = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors}
    ends = tuple(sorted({layer.rpartition(".")[2] for layer in layers}))
    named = lora if lora.target_modules else lora.model_copy(update={"target_modules": ends})
    write_adapter_config(directory, named, base=base)


def write_adapter_config(directory: Path, lora: LoraConfig, *, base: str) -> None:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(lora.target_modules) or "all-linear",
        "inference_mode": True,
    }
    write_atomic(directory / ADAPTER_CONFIG_FILE, json.dumps(config, indent=2).encode() + b"\n")


@torch.no_grad()
def merge(model: nn.Module, factors: Mapping[str, Factors]) -> None:
    """W += s·BA, in the type of W; only an export does this."""
    for name, (down, up, scale) in factors.items():
        layer: Any = model.get_submodule(name)
        layer.weight.add_((up @ down).to(layer.weight.dtype), alpha=scale)
