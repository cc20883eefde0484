"""A causal LM as three functions: prompts to states, one more token per row to states, states to logits.

A state is the input of the LM head after the final norm. Before the first use the runner compares itself with the model's own
forward pass on a few tokens, so an architecture that keeps more than keys and values is refused instead of running wrong.

Shapes: P prompts, B sequences, S positions, R rows, N states, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.policy.architecture import HeadLogits
from shoal.policy.directory import ArchitectureError
from shoal.policy.embedded.attention import (
    ATTENTION_NAME,
    ContinuationStep,
    DecodeStep,
    PrefillStep,
    Step,
    attending,
)
from shoal.policy.embedded.fused import FusedBackbone, can_fuse
from shoal.policy.embedded.head import NARROW, wide_products
from shoal.policy.embedded.kv_cache import KeyValueCache, PlaneShape, bytes_per_position
from shoal.policy.embedded.linear import Linear, choose_reordered, has_slow_products
from shoal.policy.embedded.prompts import PrefilledPrompts, Prompt, padded
from shoal.policy.embedded.widening import COMPUTE, Widener, compute_wide
from shoal.policy.exactness import pin_exact_products
from shoal.policy.prefixes import PrefixTree, visible

_PROBE_TOKENS = 6
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


Backbone = Callable[[Tensor, Tensor, Step], Tensor]
"""Token ids and positions, both [B, S], to states [B, S, D]; attention is left to the step."""


class TransformersBackbone:
    """The model's own code."""

    def __init__(self, model: Any) -> None:
        self._model = model.base_model

    def __call__(self, ids_BS: Tensor, positions_BS: Tensor, step: Step) -> Tensor:
        with attending(step):
            output = self._model(input_ids=ids_BS, position_ids=positions_BS, use_cache=False)
        states: Tensor = output.last_hidden_state
        return states


class ModelRunner:
    reads_trees = True

    def __init__(self, model: Any, *, widens: bool = False) -> None:
        """With `widens` the model's matrices are stored as they are and everything is computed in float32."""
        self.model: Any = model
        self.dtype: torch.dtype = COMPUTE if widens else model.dtype
        """In which it computes."""
        self._widener = Widener() if widens or has_slow_products(self.dtype, model.device) else None
        if widens:
            compute_wide(model)
        self.config: Any = self.model.config.get_text_config()
        self.vocab_size: int = self.config.vocab_size
        self.hidden_size: int = self.config.hidden_size
        self.max_tokens: int = getattr(self.config, "max_position_embeddings", None) or 1 << 30
        self.planes: list[PlaneShape] = []
        self._backbone: Backbone = TransformersBackbone(model)
        self._linears: list[Linear] = []
        self._reordered: list[Linear] = []
        self._head: Any = self.model.get_output_embeddings()
        self._head_logits = HeadLogits.of(self.config)
        if self._head is None or self.model.base_model is self.model:
            raise ArchitectureError(
                f"{type(model).__name__} has no separate LM head, so its states cannot be committed."
            )

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def run(self, ids_BS: Tensor, positions_BS: Tensor, step: Step) -> Tensor:
        """States [B, S, D] of a pass that attends as `step` says."""
        pin_exact_products()
        return self._backbone(ids_BS, positions_BS, step)

    def prefill(self, ids_BS: Tensor) -> tuple[Tensor, list[Tensor]]:
        """States at every position of right-padded sequences, and their cache entries as [B, heads, S, size]."""
        positions_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device).expand_as(ids_BS)
        step = PrefillStep()
        return self.run(ids_BS, positions_BS, step), step.entries

    def read_prompts(self, prompts: Sequence[Prompt]) -> PrefilledPrompts:
        """One pass over distinct prompts."""
        lengths_P = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        states_PLD, entries = self.prefill(padded(prompts, self.device))
        last_PD = states_PLD[torch.arange(len(prompts), device=self.device), lengths_P - 1]
        return PrefilledPrompts({prompt: at for at, prompt in enumerate(prompts)}, lengths_P, entries, last_PD)

    def continue_prompts(self, prompts: PrefilledPrompts, source_B: Tensor, trees: Sequence[PrefixTree]) -> Tensor:
        """States of every token of the continuations, right-padded: [B, S, D]."""
        ids_BS = padded([tree.tokens for tree in trees], self.device)
        depths_BS = padded([tree.depths for tree in trees], self.device)
        positions_BS = prompts.lengths_P[source_B][:, None] + depths_BS
        seen = None if all(tree.is_path for tree in trees) else torch.from_numpy(visible(trees)).to(self.device)
        return self.run(
            ids_BS, positions_BS, ContinuationStep(prompts.entries, source_B, positions_BS, visible_BSS=seen)
        )

    def row_bytes(self, capacity: int) -> int:
        return bytes_per_position(self.planes, self.dtype) * capacity

    def new_cache(self, rows: int, capacity: int) -> KeyValueCache:
        return KeyValueCache(self.planes, rows, capacity, dtype=self.dtype, device=self.device)

    def decode(self, tokens_R: Tensor, positions_R: Tensor, cache: KeyValueCache, longest: int) -> Tensor:
        """States after one more token per row; `longest` is the number of positions of the longest row, this one included."""
        step = DecodeStep(cache, positions_R, longest)
        return self.run(tokens_R[:, None], positions_R[:, None], step)[:, 0]

    def logits(self, states_ND: Tensor) -> Tensor:
        """In float32, also of states in bf16."""
        if self.dtype in NARROW:
            products_NV = wide_products(states_ND, self._head.weight, self._head.bias)
        else:
            products_NV = self._head(states_ND)
        return self._head_logits(products_NV[:, : self.vocab_size])

    @torch.inference_mode()
    def prepare(self) -> None:
        """Take over attention, learn the shapes of the cache, and prove the result against the model's own forward pass."""
        ids_1S = (torch.arange(_PROBE_TOKENS, device=self.device) * 7 % self.vocab_size)[None]
        reference_V = self.model(input_ids=ids_1S, use_cache=False).logits[0, -1, : self.vocab_size]
        if can_fuse(self.model):
            backbone = FusedBackbone(self.model, self.dtype, self._widener)
            self._backbone, self._head = backbone, Linear(self._head.weight, self._head.bias, widener=self._widener)
            self._linears = [*backbone.linears, self._head]
            self._reordered = choose_reordered(self._linears)
            self.weights_changed()
        else:
            self._take_over_attention()
        _, entries = self.prefill(ids_1S[:, :-1])
        self.planes = [PlaneShape(entry.shape[1], entry.shape[3]) for entry in entries]
        if len(self.planes) != 2 * self.config.num_hidden_layers:
            raise self._refusal("has layers without attention")
        own_V = self._probe_decode(ids_1S[0], entries)
        error = (own_V - reference_V).abs().max() / reference_V.abs().max().clamp_min(1e-6)
        if not error <= _TOLERANCES[self.dtype]:
            raise self._refusal(f"disagrees with its own forward pass by {float(error):.1e}")

    def weight_tensors(self) -> list[Tensor]:
        """Every tensor that holds weights, with those that join several parameters."""
        joined = [tensor for linear in self._linears for tensor in (linear.weight, linear.bias) if tensor is not None]
        return [*self.model.state_dict(keep_vars=True).values(), *joined]

    def weights_changed(self) -> None:
        """To be called after the model's tensors were written in place."""
        for linear in self._reordered:
            linear.reorder()

    def _probe_decode(self, ids_S: Tensor, entries: list[Tensor]) -> Tensor:
        cache = KeyValueCache(self.planes, 1, _PROBE_TOKENS, dtype=self.dtype, device=self.device)
        row = torch.zeros(1, dtype=torch.int64, device=self.device)
        for plane, entry in enumerate(entries):
            cache.write_prompts(plane, 0, row, entry)
        states_1D = self.decode(ids_S[-1:], row + _PROBE_TOKENS - 1, cache, _PROBE_TOKENS)
        return self.logits(states_1D)[0]

    def _take_over_attention(self) -> None:
        self.model.set_attn_implementation(ATTENTION_NAME)
        if self.model.config._attn_implementation != ATTENTION_NAME:
            raise self._refusal("does not use the attention interface of Transformers")

    def _refusal(self, why: str) -> ArchitectureError:
        return ArchitectureError(
            f"The embedded engine cannot run {type(self.model).__name__}: it {why}.", hint="Use the vLLM engine."
        )
