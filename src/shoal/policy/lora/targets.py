"""Which layers of a model an adapter changes; whatever cannot be adapted is refused with its reason."""

import difflib
from typing import Any

from torch import nn

from shoal.config import LoraConfig
from shoal.frames.policy import MODEL_TYPE
from shoal.policy.architecture import decoder_blocks
from shoal.policy.directory import ArchitectureError, some_names

SETTING = "model.lora.target_modules"


class LoraError(ArchitectureError):
    """An adapter that does not fit the model."""

    code = "lora"


def target_names(model: Any, lora: LoraConfig) -> list[str]:
    """Paths of the layers that get an adapter, in the order of the model; shapes are enough, without weights."""
    if model.config.model_type == MODEL_TYPE:
        raise LoraError("Policies of frames cannot be adapted.", hint="Train all of their weights.")
    linears = _linears(model)
    if lora.target_modules:
        for target in lora.target_modules:
            _check_target(model, linears, target)
        names = [name for name in linears if any(_means(target, name) for target in lora.target_modules)]
    else:
        _check_family(model, linears)
        names = list(linears)
    _check_rank(model, [linears[name] for name in names], lora.rank)
    return names


def _linears(model: Any) -> dict[str, nn.Linear]:
    head = model.get_output_embeddings()
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear and module is not head}


def _means(target: str, name: str) -> bool:
    """As PEFT reads it: a whole path, or its end."""
    return name == target or name.endswith(f".{target}")


def _check_target(model: Any, linears: dict[str, nn.Linear], target: str) -> None:
    if any(_means(target, name) for name in linears):
        return
    if not target:
        raise LoraError(f"{SETTING} has an empty name.")
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in linears))
    others = [module for name, module in model.named_modules() if _means(target, name)]
    if others and others[0] is model.get_output_embeddings():
        raise LoraError(
            f"{SETTING} names {target}, the LM head, which cannot be adapted: proofs are made of its inputs.",
            hint=f"Linear layers of this model: {', '.join(known)}.",
        )
    if others:
        raise LoraError(
            f"{SETTING} names {target}, which is a {type(others[0]).__name__} and not a linear layer.",
            hint=f"Linear layers of this model: {', '.join(known)}.",
        )
    near = difflib.get_close_matches(target, known, n=3, cutoff=0.4) or known
    raise LoraError(f"{SETTING} names {target}, which the model does not have.", hint=f"Nearest: {', '.join(near)}.")


def _check_family(model: Any, linears: dict[str, nn.Linear]) -> None:
    """All linear layers are to be adapted: refuse a model that keeps matrices elsewhere, which would silently stay as they are."""
    adapted = {id(module.weight) for module in linears.values()}
    left = [
        name
        for block in decoder_blocks(model)
        for name, parameter in block.named_parameters()
        if parameter.dim() > 1 and id(parameter) not in adapted
    ]
    if left or not linears:
        what = f"its {some_names(sorted(set(left)))} are no linear layers" if left else "it has no linear layers"
        known = list(dict.fromkeys(name.rpartition(".")[2] for name in linears))
        raise LoraError(
            f"{type(model).__name__} cannot be adapted as a whole: {what}.",
            hint=f"Name the layers to adapt in {SETTING}, of {', '.join(known)}." if known else "Train all weights.",
        )


def _check_rank(model: Any, layers: list[nn.Linear], rank: int) -> None:
    largest = max(min(layer.in_features, layer.out_features) for layer in layers)
    if not 0 < rank <= largest:
        raise LoraError(
            f"Rank {rank} does not fit {type(model).__name__}: the largest rank of a layer to adapt is {largest}.",
            hint=f"Set model.lora.rank to 1 … {largest}; 1 to 64 are usual.",
        )
