"""The Llama family (Llama, Qwen2, Qwen3) in as few operations as torch allows: small policies spend their time between operations.

Query, key and value projections become one matrix product, gate and up another; rotation takes three operations. The
module's parameters are re-pointed at slices of the joined matrices, so weights still exist once and are still replaced in place.
With a widener, matrices are widened for each product: either everything is computed in float32, or only products are.
Other architectures run through Transformers' own code.

Shapes: B sequences, S positions, T = B·S, D hidden size, d head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.policy.embedded.attention import Step
from shoal.policy.embedded.linear import Linear
from shoal.policy.embedded.widening import Widener

_FAMILY = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


def can_fuse(model: Any) -> bool:
    return type(model).__name__ in _FAMILY and model.config.hidden_act == "silu"


class FusedBackbone:
    """Token ids to states."""

    def __init__(self, model: Any, dtype: torch.dtype, widener: Widener | None = None) -> None:
        """States are of `dtype`."""
        decoder = model.model
        self._dtype = dtype
        self.embedding: Tensor = decoder.embed_tokens.weight
        self.rotary = decoder.rotary_emb
        self.final_norm = decoder.norm
        self.layers = [_FusedLayer(index, layer, model.config, widener) for index, layer in enumerate(decoder.layers)]
        self.linears = [linear for layer in self.layers for linear in layer.linears]

    def __call__(self, ids_BS: Tensor, positions_BS: Tensor, step: Step) -> Tensor:
        hidden_TD = F.embedding(ids_BS.reshape(-1), self.embedding).to(self._dtype)
        cos_BSd, sin_BSd = self.rotary(hidden_TD, positions_BS)
        sin_BSd[..., : sin_BSd.shape[-1] // 2].neg_()  # the sign of the rotated half
        cos, sin = cos_BSd[:, :, None], sin_BSd[:, :, None]
        for layer in self.layers:
            hidden_TD = layer(hidden_TD, ids_BS.shape, cos, sin, step)
        return _normalised(hidden_TD, self.final_norm).view(*ids_BS.shape, -1)


class _FusedLayer:
    def __init__(self, index: int, layer: Any, config: Any, widener: Widener | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index = index
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.query_heads = config.num_attention_heads
        self.rotated_heads = config.num_attention_heads + config.num_key_value_heads
        self.head_size: int = attention.head_dim
        self.scale: float = attention.scaling
        self.window: int | None = getattr(attention, "sliding_window", None)
        self.head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.qkv = _joined([attention.q_proj, attention.k_proj, attention.v_proj], widener)
        self.gate_up = _joined([mlp.gate_proj, mlp.up_proj], widener)
        self.out, self.down = (_joined([linear], widener) for linear in (attention.o_proj, mlp.down_proj))
        self.linears = (self.qkv, self.out, self.gate_up, self.down)

    def __call__(self, hidden_TD: Tensor, shape: Sequence[int], cos: Tensor, sin: Tensor, step: Step) -> Tensor:
        heads_BSHd = self.qkv(_normalised(hidden_TD, self.input_norm)).view(*shape, -1, self.head_size)
        rotated_BSHd = self._rotate(heads_BSHd[:, :, : self.rotated_heads], cos, sin)
        query, key = rotated_BSHd.transpose(1, 2).split_with_sizes(
            [self.query_heads, self.rotated_heads - self.query_heads], dim=1
        )
        value = heads_BSHd[:, :, self.rotated_heads :].transpose(1, 2)
        attended = step.attend(self.index, query, key, value, self.scale, self.window)
        hidden_TD = self.out.add_to(hidden_TD, attended.reshape(hidden_TD.shape[0], -1))
        gate, up = self.gate_up(_normalised(hidden_TD, self.mlp_norm)).chunk(2, dim=-1)
        return self.down.add_to(hidden_TD, F.silu(gate).mul_(up))

    def _rotate(self, heads_BSHd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.head_norms is not None:
            query, key = heads_BSHd.split_with_sizes([self.query_heads, self.rotated_heads - self.query_heads], dim=2)
            heads_BSHd = torch.cat(
                [_normalised(query, self.head_norms[0]), _normalised(key, self.head_norms[1])], dim=2
            )
        return torch.addcmul(heads_BSHd * cos, heads_BSHd.roll(self.head_size // 2, dims=-1), sin)


def _joined(linears: Sequence[Any], widener: Widener | None) -> Linear:
    """One weight and bias for several projections of the same input; the modules keep their part as a slice."""
    if len(linears) == 1:
        return Linear(linears[0].weight, linears[0].bias, linears, widener)
    sizes = [linear.out_features for linear in linears]
    weight = torch.cat([linear.weight.data for linear in linears])
    for linear, part in zip(linears, weight.split_with_sizes(sizes), strict=True):
        linear.weight.data = part
    if linears[0].bias is None:
        return Linear(weight, None, linears, widener)
    bias = torch.cat([linear.bias.data for linear in linears])
    for linear, part in zip(linears, bias.split_with_sizes(sizes), strict=True):
        linear.bias.data = part
    return Linear(weight, bias, linears, widener)


def _normalised(values: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(values, values.shape[-1:], norm.weight, norm.variance_epsilon)
