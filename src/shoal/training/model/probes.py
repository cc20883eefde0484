"""A small copy of an architecture, and rows that pass its thresholds: what layouts are compared on before anything is trained.

A threshold is a length at which a model computes something else: a window, a chunk, the end of the positions that it was made for.
Real ones are thousands of positions long, so the copy has short ones instead, where the rows of the run can pass them at all; the
others stay out of reach. The copy has all layers in their order and random weights, large enough that every position matters.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.errors import ShoalError
from shoal.policy.architecture import meta_model

SHORT = ([1, 2, 3], [6, 7, 1, 2, 5])
SMALL_PARAMETERS = 20_000_000
"""A model of this size is copied at full width."""
LENGTHS = re.compile(r"window(_size)?$|chunk|original_max_position|floor_scale|index_topk|local_attention$|block_size")
"""Names of settings that hold a threshold, in all architectures of Transformers."""
STRETCHED = {"dynamic", "longrope", "su"}
"""Kinds of rotary positions that change beyond `max_position_embeddings`."""
LOWERED, LONGEST_PROBED = 9, 512
VOCABULARY = 24
FAILURES = (RuntimeError, AssertionError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError)


@dataclass(frozen=True)
class Rows:
    prompts: Sequence[Sequence[int]]
    outputs: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.outputs)

    def only(self, number: int) -> "Rows":
        return Rows([self.prompts[number]], [self.outputs[number]])


def rows_past(thresholds: Sequence[int]) -> Rows:
    """Short rows, some of one prompt and with one beginning, and for each threshold rows that end before it, at it and beyond it,
    the last one twice with other tokens at the end."""
    prompts: list[Sequence[int]] = [SHORT[0], SHORT[0], SHORT[0], [4, 5], [4, 5]]
    outputs: list[Sequence[int]] = [SHORT[1], [3], [*SHORT[1][:2], 3, 1], [2, 4, 4], [5, 1]]
    for threshold in sorted(set(thresholds)):
        for length in (threshold - 1, threshold + 1, threshold + 4, 2 * threshold + 3):
            prompts.append([7, 2, 1 + length % 5])
            outputs.append([_token(place, length) for place in range(max(1, length - 2))])
        prompts.append(prompts[-1])
        outputs.append([*outputs[-1][: threshold + 1], *reversed(outputs[-1][threshold + 1 :]), 3])
    return Rows(prompts, outputs)


def _token(place: int, length: int) -> int:
    return 1 + (3 * place + place * place + length) % (VOCABULARY - 2)


def probe_model(config: Any, longest_row: int = 0) -> tuple[nn.Module | None, list[int]]:
    """The copy on the CPU in fp32 with the thresholds that rows can pass, or None if none can be built."""
    for lower in (True, False):
        changed = copy.deepcopy(config)
        try:
            if _size(config) > SMALL_PARAMETERS:
                narrow(changed.get_text_config())
            if lower:
                lower_thresholds(changed.get_text_config(), longest_row)
            thresholds = reached(changed.get_text_config(), longest_row)
            if max(thresholds, default=0) > LONGEST_PROBED or _size(changed) > 10 * SMALL_PARAMETERS:
                continue
            return _built(changed), thresholds
        except (*FAILURES, ShoalError):
            continue
    return None, []


def narrow(text: Any) -> None:
    """Fewer heads, experts and tokens, thinner layers; layers, head width and everything about positions stay."""
    heads, groups = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    text.num_attention_heads = 2
    if groups is not None:
        text.num_key_value_heads = 2 if groups == heads else 1
    text.hidden_size = 2 * head_dim
    for name, value in _integers(text):
        if "intermediate" in name:
            setattr(text, name, min(value, 64))
        elif re.search(r"num_(local_)?experts$|n_routed_experts", name):
            setattr(text, name, min(value, 4))
        elif re.search(r"experts_per_tok|topk_group|n_group", name):
            setattr(text, name, min(value, 2 if "tok" in name else 1))
        elif name.startswith("vocab_size"):
            setattr(text, name, min(value, 4 * VOCABULARY))
        elif name.endswith("_token_id"):
            setattr(text, name, 0)


def lower_thresholds(text: Any, longest_row: int = 0) -> None:
    """Each threshold that rows of the run can pass comes within reach of a few tokens."""
    for holder, name, value in _thresholds(text):
        if value > LOWERED and (not longest_row or value < longest_row):
            _set(holder, name, LOWERED)
    for rope in _rope_settings(text):
        original = rope.get("original_max_position_embeddings")
        if original == LOWERED and not isinstance(rope.get("factor"), int | float):
            text.max_position_embeddings = max(text.max_position_embeddings, 2 * LOWERED)


def reached(text: Any, longest_row: int = 0) -> list[int]:
    """The thresholds that rows can pass."""
    return sorted(
        {value for _, _, value in _thresholds(text) if value > 0 and (not longest_row or value < longest_row)}
    )


def stretches_positions(text: Any, longest_row: int = 0) -> bool:
    """Whether rows can pass a length beyond which rotary positions change, in some kinds for the rows that follow, too."""
    for rope in _rope_settings(text):
        if _is_stretched(rope):
            original = rope.get("original_max_position_embeddings") or text.max_position_embeddings
            if not longest_row or original < longest_row:
                return True
    return False


def _is_stretched(rope: dict[str, Any]) -> bool:
    return (rope.get("rope_type") or rope.get("type")) in STRETCHED


def _thresholds(text: Any) -> Iterator[tuple[Any, str, int]]:
    """Where each is held, its name and its value."""
    for name, value in _integers(text):
        if LENGTHS.search(name):
            yield text, name, value
    for rope in _rope_settings(text):
        for name, value in list(rope.items()):
            if isinstance(value, int) and not isinstance(value, bool) and LENGTHS.search(name):
                yield rope, name, value
        if _is_stretched(rope) and "original_max_position_embeddings" not in rope:
            yield text, "max_position_embeddings", text.max_position_embeddings


def _rope_settings(text: Any) -> list[dict[str, Any]]:
    """One for all layers, or one for each kind of layer."""
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(found, dict):
        return []
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]


def _integers(text: Any) -> list[tuple[str, int]]:
    return [
        (name, value) for name, value in vars(text).items() if isinstance(value, int) and not isinstance(value, bool)
    ]


def _set(holder: Any, name: str, value: int) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def _size(config: Any) -> int:
    return sum(parameter.numel() for parameter in meta_model(config).parameters())


def _built(config: Any) -> nn.Module:
    """With weights that make differences visible: Transformers' own leave attention almost uniform."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():
                scale = 1.5 / parameter.shape[-1] ** 0.5
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model
