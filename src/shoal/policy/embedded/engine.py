"""The embedded engine: any causal LM that Transformers builds, of any family, in this process, on CPU or one GPU.

Weights exist once and are replaced in place. Where they are stored narrower than they are computed with, several versions stay side
by side while memory allows, for a validator that changes between them. With LoRA the base stays, and versions of the adapter are
resident side by side: changing between them moves a pointer. A stream batches continuously over a preallocated cache that later
streams use again; `score` is a prefill in batches of bounded size. Neither holds the logits or states of everything at once.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.config import LoraConfig
from shoal.policy.directory import check_vocabulary, has_weights, weight_files, weights_identity
from shoal.policy.embedded.decode_batch import DecodeBatch
from shoal.policy.embedded.family import RowCache, can_widen, make_runner
from shoal.policy.embedded.resident import ResidentWeights
from shoal.policy.engine import (
    LORA_CLASS,
    Completion,
    EngineBusyError,
    GenerationRequest,
    Scored,
    ScoreRequest,
    check_generation,
    check_ready,
    check_scoring,
    generate_all,
    positions_needed,
)
from shoal.policy.exactness import use_exact_products
from shoal.policy.lora.resident import ResidentAdapters
from shoal.policy.memory import CachePlan, available_bytes, cache_rows
from shoal.policy.models import DTYPES, build_empty_model, build_model, build_narrow_model
from shoal.policy.scoring import score_requests
from shoal.policy.weights import load_weights, tensor_bytes

CAPACITY_STEP = 64


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
        lora: LoraConfig | None = None,
        stored: str = "",
    ) -> None:
        """`model_files` holds config.json; if it holds safetensors too, they are loaded. With `lora` they are a base that generates
        nothing before an adapter is loaded. Weights are kept in `stored`, if it is given, and widened to `dtype` layer by layer."""
        use_exact_products(torch.device(device))
        stored = stored if can_widen(model_files, stored, dtype) else dtype
        self.numerics_class = f"torch/{dtype}/{torch.device(device).type}{LORA_CLASS if lora else ''}"
        self.max_batch, self.prefill_tokens = max_batch, prefill_tokens
        self._eos_token_ids = tuple(eos_token_ids)
        self._loaded = has_weights(model_files)
        model = _build(model_files, stored, dtype, device, has_weights=self._loaded)
        self._adapters: ResidentAdapters | None = None
        if lora is not None:
            weight_files(model_files)  # a base without weights is refused
            self._adapters, self._loaded = ResidentAdapters(model, lora, DTYPES[dtype]), False
        self._runner = make_runner(model, widens=stored != dtype)
        self._cache: RowCache | None = None
        self._stream: DecodeBatch | None = None
        self._weights = 0
        check_vocabulary(self._eos_token_ids, self.vocab_size)
        self._widens = stored != dtype
        self._resident: ResidentWeights | None = None
        if self._loaded:
            self._prepare()

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    def load(self, directory: Path) -> None:
        if self._stream is not None and self._stream.unfinished:
            raise EngineBusyError(f"{self._stream.unfinished} requests still run with the old weights.")
        if self._adapters is not None:
            self._adapters.use(directory, self._try_products)
        elif self._resident is not None:
            self._resident.use(weights_identity(directory), lambda: self._read(directory))
        else:
            self._read(directory)
        self._weights += 1
        if self._stream is not None:
            self._stream.weights_changed(self._weights)
        if self._loaded and self._adapters is None:
            self._runner.weights_changed()
        elif not self._loaded:
            self._prepare()
            self._loaded = True

    def _read(self, directory: Path) -> None:
        self._try_products()
        load_weights(self._runner.model, directory)

    def _try_products(self) -> None:
        """With every version that is read; a change to one that is here costs less than the try."""
        use_exact_products(self._runner.device)

    def _prepare(self) -> None:
        self._runner.prepare()
        if self._widens and self._adapters is None:
            self._resident = ResidentWeights(self._runner.weight_tensors())

    def open(self, *, temperature: float, max_tokens: int, rows: int | None = None) -> DecodeBatch:
        check_ready(self._loaded, temperature)
        if self._stream is not None:
            raise EngineBusyError("The engine has an open stream.")
        rows = min(rows or self.max_batch, self.max_batch)
        self._stream = DecodeBatch(
            self._runner,
            self._cache_for(rows, min(max_tokens, self._runner.max_tokens)),
            rows=rows,
            temperature=temperature,
            eos_token_ids=self._eos_token_ids,
            prefill_tokens=self.prefill_tokens,
            weights=self._weights,
            on_close=self._closed,
        )
        return self._stream

    def _closed(self) -> None:
        self._stream = None

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
        # Long prompts first: neighbours pad little, equal ones share a prefill, and the tail is short.
        order = sorted(
            range(len(requests)), key=lambda at: (len(requests[at].prompt_tokens), requests[at].prompt_tokens)
        )[::-1]
        with self.open(temperature=temperature, max_tokens=positions_needed(requests), rows=len(requests)) as stream:
            made = generate_all(stream, [requests[at] for at in order], on_progress)
        return [completion for _, completion in sorted(zip(order, made, strict=True), key=lambda pair: pair[0])]

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest], *, temperature: float) -> list[Scored]:
        check_ready(self._loaded, temperature)
        check_scoring(requests, vocab_size=self._runner.vocab_size, max_tokens=self._runner.max_tokens)
        return score_requests(self._runner, requests, temperature=temperature, token_limit=self.prefill_tokens)

    @torch.inference_mode()
    def entropies(self, states_ND: Tensor, *, temperature: float) -> Tensor:
        """Entropy of the policy at each of some scored states."""
        logits_NV = self._runner.logits(states_ND.to(self._runner.device, self._runner.dtype)) / temperature
        logprobs_NV = torch.log_softmax(logits_NV.float(), dim=-1)
        return -(logprobs_NV.exp() * logprobs_NV).sum(-1)

    def _cache_for(self, rows: int, positions: int) -> RowCache:
        """The cache of the last stream if it is large enough, else a new one; as many rows as memory allows."""
        capacity = -(-positions // CAPACITY_STEP) * CAPACITY_STEP
        if self._cache is None or self._cache.rows < rows or self._cache.capacity < capacity:
            self._cache = None  # freed before the new one is made
            self._cache = self._new_cache(rows, capacity)
        return self._cache

    def _new_cache(self, rows: int, capacity: int) -> RowCache:
        runner = self._runner
        plan = CachePlan(
            weights_bytes=tensor_bytes(runner.model),
            row_bytes=runner.row_bytes(capacity),
            available_bytes=available_bytes(runner.device),
        )
        cache: RowCache = runner.new_cache(cache_rows(plan, rows), capacity)
        return cache


def _build(model_files: Path, stored: str, dtype: str, device: str, *, has_weights: bool) -> nn.Module:
    if stored == dtype:
        return (build_model if has_weights else build_empty_model)(model_files, dtype, device)
    model = build_narrow_model(model_files, stored, device)
    if has_weights:
        load_weights(model, model_files)
    return model
