"""Logits of narrow numerics: bf16 states times a bf16 LM head, summed in float32 and not rounded to bf16 again.

The rounding of logits would be the largest error of an honest bf16 worker (a logit of 27 is known to 0.06), so it would decide what
audits can tell apart. On a GPU the same tensor-core product writes float32; elsewhere the head is widened block by block. vLLM does
the same with `head_dtype`.

Shapes: N states, D hidden size, V vocabulary.
"""

import torch
from torch import Tensor

from shoal.policy.products import product

NARROW = (torch.bfloat16, torch.float16)
BLOCK_VALUES = 1 << 21
"""Of the head, widened at once: they stay in the cache of a core."""


def wide_products(states_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """states · headᵀ + bias in float32."""
    bias = None if bias_V is None else bias_V.float()
    if states_ND.device.type == "cuda":
        products_NV: Tensor = torch.mm(states_ND, weight_VD.t(), out_dtype=torch.float32)
        return products_NV if bias is None else products_NV.add_(bias)
    states, rows = states_ND.float(), max(1, BLOCK_VALUES // weight_VD.shape[1])
    products_NV = torch.empty(states.shape[0], weight_VD.shape[0], dtype=torch.float32, device=states.device)
    for start in range(0, weight_VD.shape[0], rows):
        part = slice(start, start + rows)
        products_NV[:, part] = product(states, weight_VD[part].float(), None if bias is None else bias[part])
    return products_NV
