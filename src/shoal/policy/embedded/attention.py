"""The attention function that the engine registers with Transformers: any model that uses its attention interface can run.

The model is called without a cache of its own; keys and values pass through here. A `PrefillStep` attends causally inside
right-padded sequences (padding comes last, so no mask is needed) and keeps keys and values; a `ContinuationStep` goes on from
there; a `DecodeStep` appends one position per row to the cache. Features that these do not compute are refused, never ignored.

Shapes: B sequences, S positions, R rows, H query heads, K key-value heads, G = H/K, L cached positions, d head size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from shoal.policy.architecture import causal_mask
from shoal.policy.directory import ArchitectureError
from shoal.policy.embedded.kv_cache import KeyValueCache

ATTENTION_NAME = "shoal"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


class Step(Protocol):
    """One pass through the model."""

    def attend(
        self, layer: int, query_BHSd: Tensor, key_BKSd: Tensor, value_BKSd: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """The attended values as [B, S, H, d]."""
        ...


_current_step: ContextVar[Step] = ContextVar("shoal_attention_step")


@contextmanager
def attending(step: Step) -> Iterator[None]:
    """Model calls inside this block attend as `step` says."""
    token = _current_step.set(step)
    try:
        yield
    finally:
        _current_step.reset(token)


class PrefillStep:
    """Whole sequences, right-padded; `entries` collects keys and values alternately, layer by layer."""

    def __init__(self) -> None:
        self.entries: list[Tensor] = []

    def attend(
        self, layer: int, query_BHSd: Tensor, key_BKSd: Tensor, value_BKSd: Tensor, scale: float, window: int | None
    ) -> Tensor:
        assert layer == len(self.entries) // 2, "layers run in order"
        self.entries += [key_BKSd, value_BKSd]
        length = query_BHSd.shape[2]
        mask = None if window is None or length <= window else causal_mask(length, window, query_BHSd.device)
        attended_BHSd = F.scaled_dot_product_attention(
            query_BHSd, key_BKSd, value_BKSd, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        return attended_BHSd.transpose(1, 2)


class ContinuationStep:
    """Right-padded sequences that go on after prompts whose entries are known; `source_B` names the prompt of each.

    If it `keeps` them, `continued` collects keys and values of the new positions alternately, layer by layer. With `visible_BSS`
    each new position sees those that it says, else all before it.
    """

    def __init__(
        self,
        entries: Sequence[Tensor],
        source_B: Tensor,
        positions_BS: Tensor,
        *,
        keeps: bool = False,
        visible_BSS: Tensor | None = None,
    ) -> None:
        self.entries, self.source_B, self.positions_BS, self._keeps = entries, source_B, positions_BS, keeps
        self._visible_BSS = visible_BSS
        self.continued: list[Tensor] = []
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, query_BHSd: Tensor, key_BKSd: Tensor, value_BKSd: Tensor, scale: float, window: int | None
    ) -> Tensor:
        if self._keeps:
            self.continued += [key_BKSd, value_BKSd]
        keys = torch.cat([self.entries[2 * layer][self.source_B], key_BKSd], dim=2)
        values = torch.cat([self.entries[2 * layer + 1][self.source_B], value_BKSd], dim=2)
        attended_BHSd = F.scaled_dot_product_attention(
            query_BHSd, keys, values, attn_mask=self._mask(window), scale=scale, enable_gqa=True
        )
        return attended_BHSd.transpose(1, 2)

    def _mask(self, window: int | None) -> Tensor:
        """True where a query may see a key: of the prompt those before its end, of its own those up to itself."""
        if window not in self._masks:
            device, length = self.positions_BS.device, self.positions_BS.shape[1]
            columns_L = torch.arange(self.entries[0].shape[2], device=device)
            prompt_BSL = (columns_L < self.positions_BS[:, :1, None]).expand(-1, length, -1)
            if window is not None:
                prompt_BSL = prompt_BSL & (self.positions_BS[:, :, None] - columns_L < window)
            if self._visible_BSS is None:
                own_BSS = causal_mask(length, window, device).expand(prompt_BSL.shape[0], -1, -1)
            else:
                distances_BSS = self.positions_BS[:, :, None] - self.positions_BS[:, None]
                own_BSS = self._visible_BSS if window is None else self._visible_BSS & (distances_BSS < window)
            self._masks[window] = torch.cat([prompt_BSL, own_BSS], dim=2)[:, None]
        return self._masks[window]


class DecodeStep:
    """One new position for each of the first R rows of the cache."""

    def __init__(self, cache: KeyValueCache, positions_R: Tensor, longest: int) -> None:
        self.cache, self.longest = cache, longest
        self.rows = positions_R.shape[0]
        self.positions_R = positions_R
        self._targets: dict[int, Tensor] = {}
        self._masks: dict[int | None, Tensor] = {}
        self._wide_masks: dict[tuple[int | None, int], Tensor] = {}

    def attend(
        self, layer: int, query_BHSd: Tensor, key_BKSd: Tensor, value_BKSd: Tensor, scale: float, window: int | None
    ) -> Tensor:
        keys_RKLd = self._append(2 * layer, key_BKSd)
        values_RKLd = self._append(2 * layer + 1, value_BKSd)
        rows, heads, _, size = query_BHSd.shape
        # The G queries that share a key-value head become its query sequence, so nothing is repeated.
        query_RKGd = query_BHSd.reshape(rows, keys_RKLd.shape[1], -1, size)
        if query_BHSd.device.type == "cpu" and query_BHSd.dtype == torch.float32:
            attended = self._attend_plainly(query_RKGd, keys_RKLd, values_RKLd, scale, window)
        else:
            mask = self._mask(window, query_BHSd.dtype)
            attended = F.scaled_dot_product_attention(query_RKGd, keys_RKLd, values_RKLd, attn_mask=mask, scale=scale)
        return attended.reshape(rows, 1, heads, -1)

    def _attend_plainly(
        self, query_RKGd: Tensor, keys_RKLd: Tensor, values_RKLd: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Two products and a softmax: for so few queries the CPU is half again as fast as with torch's fused kernel."""
        query, keys, values = (tensor.flatten(0, 1) for tensor in (query_RKGd, keys_RKLd, values_RKLd))
        heads = query_RKGd.shape[1]
        if (window, heads) not in self._wide_masks:
            mask_R11L = self._mask(window, query.dtype)
            self._wide_masks[window, heads] = mask_R11L[:, 0].repeat_interleave(heads, dim=0)
        scores = torch.baddbmm(self._wide_masks[window, heads], query, keys.transpose(1, 2), alpha=scale)
        return torch.bmm(scores.softmax(dim=-1), values)

    def _append(self, plane: int, entries_RK1d: Tensor) -> Tensor:
        plane_RKCd = self.cache.planes[plane]
        _, heads, _, size = plane_RKCd.shape
        plane_RKCd.view(-1, size).index_copy_(0, self._places(heads), entries_RK1d.reshape(-1, size))
        return plane_RKCd[: self.rows, :, : self.longest]

    def _places(self, heads: int) -> Tensor:
        """Where the new position of each row and head lies in a flattened plane."""
        if heads not in self._targets:
            capacity, device = self.cache.capacity, self.positions_R.device
            starts_RK = torch.arange(self.rows * heads, device=device).view(self.rows, heads) * capacity
            self._targets[heads] = (starts_RK + self.positions_R[:, None]).view(-1)
        return self._targets[heads]

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            columns_L = torch.arange(self.longest, device=self.positions_R.device)
            hidden_RL = columns_L > self.positions_R[:, None]
            if window is not None:
                hidden_RL |= columns_L <= self.positions_R[:, None] - window
            mask_RL = torch.zeros(hidden_RL.shape, dtype=dtype, device=hidden_RL.device)
            self._masks[window] = mask_RL.masked_fill_(hidden_RL, float("-inf"))[:, None, None]
        return self._masks[window]


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    unsupported = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if unsupported or getattr(module, "is_causal", True) is False:
        what = ", ".join(unsupported) or "attention that is not causal"
        raise ArchitectureError(f"The embedded engine does not compute {what}, which this model uses.")
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    layer: int = module.layer_idx  # type: ignore[assignment]  # an int, but modules type attributes as tensors
    return _current_step.get().attend(layer, query, key, value, scale, options.get("sliding_window")), None


AttentionInterface.register(ATTENTION_NAME, _attention)
