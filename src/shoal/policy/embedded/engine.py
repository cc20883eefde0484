"""The embedded engine: any causal LM that Transformers builds, in this process, on CPU or one GPU.

Weights exist once and are replaced in place. `generate` batches continuously over a preallocated cache that later calls use
again; `score` is a prefill in batches of bounded size. Neither holds the logits or states of everything at once.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from shoal.policy.directory import check_vocabulary, has_weights
from shoal.policy.embedded.decode_batch import DecodeBatch
from shoal.policy.embedded.kv_cache import KeyValueCache, bytes_per_position
from shoal.policy.embedded.runner import ModelRunner
from shoal.policy.engine import (
    Completion,
    GenerationRequest,
    Scored,
    ScoreRequest,
    check_generation,
    check_ready,
    check_scoring,
)
from shoal.policy.exactness import use_exact_products
from shoal.policy.memory import CachePlan, available_bytes, cache_rows
from shoal.policy.models import build_empty_model, build_model
from shoal.policy.scoring import score_requests
from shoal.policy.weights import load_weights, tensor_bytes

_CAPACITY_STEP = 64


class TorchEngine:
    def __init__(
        self,
        model_files: Path,
        *,
        eos_token_ids: Sequence[int],
        dtype: str = "float32",
        device: str = "cpu",
        max_batch: int = 256,
        prefill_tokens: int = 4096,
    ) -> None:
        """`model_files` holds config.json; if it holds safetensors too, they are loaded."""
        use_exact_products(torch.device(device))
        self.numerics_class = f"torch/{dtype}/{torch.device(device).type}"
        self.max_batch, self.prefill_tokens = max_batch, prefill_tokens
        self._eos_token_ids = tuple(eos_token_ids)
        self._loaded = has_weights(model_files)
        build = build_model if self._loaded else build_empty_model
        self._runner = ModelRunner(build(model_files, dtype, device))
        self._cache: KeyValueCache | None = None
        check_vocabulary(self._eos_token_ids, self.vocab_size)
        if self._loaded:
            self._runner.prepare()

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    def load(self, directory: Path) -> None:
        load_weights(self._runner.model, directory)
        if self._loaded:
            self._runner.weights_changed()
        else:
            self._runner.prepare()
            self._loaded = True

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        temperature: float,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        check_ready(self._loaded, temperature)
        check_generation(requests, vocab_size=self._runner.vocab_size, max_tokens=self._runner.max_tokens)
        if not requests:
            return []
        batch = DecodeBatch(
            self._runner,
            self._cache_for(requests),
            requests,
            temperature=temperature,
            eos_token_ids=self._eos_token_ids,
            prefill_tokens=self.prefill_tokens,
        )
        return batch.run(on_progress)

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest], *, temperature: float) -> list[Scored]:
        check_ready(self._loaded, temperature)
        check_scoring(requests, vocab_size=self._runner.vocab_size, max_tokens=self._runner.max_tokens)
        return score_requests(self._runner, requests, temperature=temperature, token_limit=self.prefill_tokens)

    def _cache_for(self, requests: Sequence[GenerationRequest]) -> KeyValueCache:
        """The cache of the last call if it is large enough, else a new one; as many rows as memory allows."""
        longest = max(len(request.prompt_tokens) + request.max_new_tokens for request in requests)
        capacity = -(-longest // _CAPACITY_STEP) * _CAPACITY_STEP
        rows = min(self.max_batch, len(requests))
        if self._cache is None or self._cache.rows < rows or self._cache.capacity < capacity:
            self._cache = None  # freed before the new one is made
            self._cache = self._new_cache(rows, capacity)
        return self._cache

    def _new_cache(self, rows: int, capacity: int) -> KeyValueCache:
        runner = self._runner
        plan = CachePlan(
            weights_bytes=tensor_bytes(runner.model),
            row_bytes=bytes_per_position(runner.planes, runner.dtype) * capacity,
            available_bytes=available_bytes(runner.device),
        )
        return KeyValueCache(runner.planes, cache_rows(plan, rows), capacity, dtype=runner.dtype, device=runner.device)
