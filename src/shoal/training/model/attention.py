"""Causal attention inside the rows of a packed bin, and nowhere else.

Registered with Transformers as `shoal_packed`; the plan travels as the keyword argument `attention_plan`. On CPU and in fp32
rows of similar length are padded to blocks, so there is no mask over the bin; on GPU in half precision the variable-length
flash kernel is used. Lengths, places and masks come with the plan: no layer waits for the device.
Shapes: T positions, H heads, R rows, S row length, L places of all rows, D head width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from shoal.training.packing.bins import AttentionBlock, AttentionPlan

PACKED_ATTENTION = "shoal_packed"
HALF = (torch.float16, torch.bfloat16)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_plan: AttentionPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Query, key and value are [1, H, T, D]; the output is [1, T, H, D]."""
    assert attention_mask is None
    assert softcap is None
    assert s_aux is None
    query_T, key_T, value_T = (tensor[0].transpose(0, 1) for tensor in _in_one_dtype(query, key, value))
    if _has_varlen(query_T.device, query_T.dtype):
        rows = _attend_rows(query_T, key_T, value_T, attention_plan, scaling, sliding_window)
        return rows.index_select(0, attention_plan.rows.back_T)[None], None
    parts = [
        _attend_block(query_T, key_T, value_T, block, attention_plan, scaling, sliding_window)
        for block in attention_plan.blocks
    ]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows.index_select(0, attention_plan.back_T)[None], None


def _in_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast rotary positions leave queries and keys in fp32; the products are meant to be in its dtype."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


def _attend_block(
    query_T: Tensor,
    key_T: Tensor,
    value_T: Tensor,
    block: AttentionBlock,
    plan: AttentionPlan,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    rows, length = block.index_RS.shape
    index = block.index_RS.flatten()
    query, key, value = (
        tensor.index_select(0, index).view(rows, length, *tensor.shape[1:]).transpose(1, 2)
        for tensor in (query_T, key_T, value_T)
    )
    banded = window is not None and window < length
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=plan.mask(length, window) if window is not None and banded else None,
        is_causal=not banded,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).flatten(0, 1)


def _has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in HALF


def _attend_rows(
    query_T: Tensor, key_T: Tensor, value_T: Tensor, plan: AttentionPlan, scaling: float | None, window: int | None
) -> Tensor:
    """All rows in one call, none padded."""
    from torch.nn.attention.varlen import varlen_attn

    rows = plan.rows
    query, key, value = (tensor.index_select(0, rows.index_L) for tensor in (query_T, key_T, value_T))
    output = varlen_attn(
        query,
        key,
        value,
        rows.starts,
        rows.starts,
        rows.longest,
        rows.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)
    return output


def register() -> None:
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
