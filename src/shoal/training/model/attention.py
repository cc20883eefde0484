"""Causal attention inside the rows of a packed bin, and nowhere else.

Registered with Transformers as `shoal_packed`; the plan travels as the keyword argument `attention_plan`. On CPU and in fp32
rows of similar length are padded to blocks, so there is no mask over the bin; on GPU in half precision the variable-length
flash kernel is used. Shapes: T positions, H heads, R rows, S row length, D head width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from shoal.policy.architecture import causal_mask
from shoal.training.packing.bins import AttentionBlock, AttentionPlan

PACKED_ATTENTION = "shoal_packed"


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
    query_T, key_T, value_T = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attend = _attend_varlen if _has_varlen(query) else _attend_block
    parts = [attend(query_T, key_T, value_T, block, scaling, sliding_window) for block in attention_plan.blocks]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows.index_select(0, attention_plan.back_T)[None], None


def _attend_block(
    query_T: Tensor, key_T: Tensor, value_T: Tensor, block: AttentionBlock, scaling: float | None, window: int | None
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
        attn_mask=causal_mask(length, window, query.device) if banded else None,
        is_causal=not banded,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).flatten(0, 1)


def _has_varlen(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def _attend_varlen(
    query_T: Tensor, key_T: Tensor, value_T: Tensor, block: AttentionBlock, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    rows, length = block.index_RS.shape
    lengths = torch.tensor(block.lengths_R, device=query_T.device)
    real = torch.arange(length, device=query_T.device)[None] < lengths[:, None]
    index = block.index_RS[real]
    query, key, value = (tensor.index_select(0, index) for tensor in (query_T, key_T, value_T))
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    output = varlen_attn(
        query,
        key,
        value,
        starts,
        starts,
        length,
        length,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)
    padded = output.new_zeros(rows * length, *output.shape[1:])
    return padded.index_copy(0, real.flatten().nonzero()[:, 0], output)


def register() -> None:
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
