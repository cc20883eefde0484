"""In which layout a model's batches run: the fastest one that reproduces the model's own logits, row by row.

Layouts are tried on a small copy of the architecture in fp32 (`probes.py`), with rows that pass every threshold that the run's rows
can pass, and then on the model itself with short rows. A layout that raises or differs is left for the next one; a model that none
reproduces, that looks ahead, or whose logits depend on what it computed before, is refused.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from shoal.errors import ShoalError, first_line
from shoal.training.model.attention import PACKED_ATTENTION
from shoal.training.model.distributed import World
from shoal.training.model.probes import SHORT, Rows, probe_model, rows_past, stretches_positions
from shoal.training.packing.bins import build_packed, build_padded
from shoal.training.packing.packing import group_by_prompt

if TYPE_CHECKING:
    from shoal.training.model.model import PolicyModel

Layout = Literal["packed", "padded", "eager", "single", "single_eager"]
"""Packed bins; padded rows with fused attention or the model's own; one row at a time with either."""
ATTENTION: dict[Layout, str] = {
    "packed": PACKED_ATTENTION,
    "padded": "sdpa",
    "eager": "eager",
    "single": "sdpa",
    "single_eager": "eager",
}
FP32_TOLERANCE, BF16_TOLERANCE = 1e-3, 0.15
"""In log-probability; a wrong mask or a missed logit scale is off by far more."""
FAILURES = (RuntimeError, AssertionError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError)
"""What a layout that an architecture does not support may raise from inside Transformers."""


class UnsupportedModelError(ShoalError):
    """An architecture whose logits this engine does not reproduce."""

    code = "unsupported_model"
    permanent = True


def possible_layouts(model: Any) -> list[Layout]:
    """Fastest first. Packing needs positions to be mixed by causal or windowed attention through Transformers' interface only."""
    config = model.config.get_text_config()
    if not model._supports_sdpa or getattr(config, "attn_logit_softcapping", None):
        return ["eager", "single_eager"]
    kinds = set(getattr(config, "layer_types", None) or ())
    usual = kinds <= {"full_attention", "sliding_attention"} and not getattr(config, "attention_chunk_size", None)
    others: list[Layout] = ["padded", "eager", "single", "single_eager"]
    return ["packed", *others] if model._supports_attention_backend and usual else others


def choose_layout(
    policy: "PolicyModel", world: World, tolerance: float = FP32_TOLERANCE, *, longest_row: int = 0
) -> None:
    """The first layout that agrees with the model's own logits; `longest_row` bounds the rows of the run, 0 does not.

    The main rank tries the copy, and its answer holds for all.
    """
    refusal, passed = json.loads(world.share(json.dumps(_try_copy(policy, longest_row)) if world.is_main else ""))
    if refusal:
        raise _unsupported(policy, refusal)
    policy.set_layout("eager")
    rows = rows_past([])
    truth = _plain(policy, rows, world.device)
    for layout in passed:
        if _agrees(policy, layout, rows, truth, world.device, tolerance):
            return
    raise _unsupported(policy, "Its LM head or its position handling is of a kind that is not supported yet.")


def _unsupported(policy: "PolicyModel", reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The engine does not reproduce the logits of {type(policy.model).__name__}.", hint=reason
    )


def _try_copy(policy: "PolicyModel", longest_row: int) -> tuple[str, list[Layout]]:
    """Why the architecture cannot be trained, or its layouts, fastest first."""
    copy, thresholds = probe_model(policy.model.config, longest_row)
    if copy is None:
        if stretches_positions(policy.model.config.get_text_config(), longest_row):
            return "Its positions change at a length that rows of this run can pass, and no small copy shows how.", []
        # Nobody has seen the architecture past its thresholds: each row by itself, as the model runs alone.
        return "", [layout for layout in possible_layouts(policy.model) if layout.startswith("single")]
    return find_layouts(type(policy)(copy, temperature=policy.temperature), thresholds)


@torch.no_grad()
def find_layouts(policy: "PolicyModel", thresholds: Sequence[int]) -> tuple[str, list[Layout]]:
    """The layouts that reproduce a model past all thresholds, or why none does."""
    rows, device = rows_past(thresholds), torch.device("cpu")
    try:
        policy.set_layout("eager")
        truth = _plain(policy, rows, device)
        again = _plain(policy, rows, device, order=range(len(rows) - 1, -1, -1))
    except FAILURES as error:
        return f"It does not run on plain rows: {first_line(error)}.", []
    if not _close(truth, again):
        return "Its logits depend on what it computed before, past a threshold that rows of this run can pass.", []
    if not _is_causal(policy, device):
        return "It looks ahead: the probability of a token depends on tokens after it.", []
    passed = [
        layout
        for layout in possible_layouts(policy.model)
        if _agrees(policy, layout, rows, truth, device, FP32_TOLERANCE)
    ]
    return "" if passed else "No layout of its rows gives its own logits.", passed


def _agrees(
    policy: "PolicyModel", layout: Layout, rows: Rows, truth: Tensor, device: torch.device, tolerance: float
) -> bool:
    try:
        policy.set_layout(layout)
        return _close(_in_layout(policy, rows, device), truth, tolerance)
    except FAILURES:
        return False


def _close(ours: Tensor, truth: Tensor, tolerance: float = FP32_TOLERANCE) -> bool:
    return bool(((ours - truth).abs() < tolerance).all())


def _is_causal(policy: "PolicyModel", device: torch.device) -> bool:
    prompt, output = SHORT
    whole = _plain(policy, Rows([prompt], [output]), device)
    start = _plain(policy, Rows([prompt], [output[:-2]]), device)
    return _close(whole[:-2], start)


@torch.no_grad()
def _plain(policy: "PolicyModel", rows: Rows, device: torch.device, order: Sequence[int] = ()) -> Tensor:
    """The model's own logits, each row by itself, computed in the given order and returned in that of the rows."""
    order = order or range(len(rows))
    found = {number: _logprobs(policy, rows.only(number), device, own_head=False) for number in order}
    return torch.cat([found[number] for number in range(len(rows))])


@torch.no_grad()
def _in_layout(policy: "PolicyModel", rows: Rows, device: torch.device) -> Tensor:
    if not policy.layout.startswith("single"):
        return _logprobs(policy, rows, device)
    return torch.cat([_logprobs(policy, rows.only(number), device) for number in range(len(rows))])


def _logprobs(policy: "PolicyModel", rows: Rows, device: torch.device, *, own_head: bool = True) -> Tensor:
    prompt_groups = group_by_prompt(rows.prompts, rows.outputs, 1 << 20, share=policy.packed)
    build = build_packed if policy.packed else build_padded
    bin = build(prompt_groups, rows.prompts, rows.outputs)
    logprobs, _, _ = policy(bin.to(device), own_head=own_head)
    # Packed bins may hold their members in another order.
    return torch.as_tensor(logprobs)[torch.argsort(bin.member_N, stable=True).to(device)]
