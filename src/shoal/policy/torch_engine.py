"""The embedded engine: any causal LM that Transformers builds, in this process, on CPU or one GPU.

Weights exist once and are replaced in place. `generate` batches continuously over a preallocated cache; `score` is one
prefill in batches of bounded size, with logits only where there is output. Neither holds the logits of everything at once.

Shapes: B sequences, S positions, N output positions, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shoal.policy.decode_batch import DecodeBatch
from shoal.policy.engine import (
    Completion,
    GenerationRequest,
    Scored,
    ScoreRequest,
    WeightsNotLoadedError,
    check_generation,
    check_scoring,
    check_temperature,
    signed_seed,
)
from shoal.policy.kv_cache import KeyValueCache, bytes_per_position
from shoal.policy.memory import MemoryPlan, available_bytes, cache_rows
from shoal.policy.models import ModelError, build_empty_model, build_model, has_weights, load_weights, tensor_bytes
from shoal.policy.runner import ModelRunner
from shoal.proofs.sampling import token_margins

# Logits of one scoring chunk, in values: large enough for big matrix products, small enough to forget.
_LOGITS_CHUNK = 1 << 22
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
        self.numerics_class = f"torch/{dtype}/{torch.device(device).type}"
        self.max_batch, self.prefill_tokens = max_batch, prefill_tokens
        self._eos_token_ids = tuple(eos_token_ids)
        self._loaded = has_weights(model_files)
        build = build_model if self._loaded else build_empty_model
        self._runner = ModelRunner(build(model_files, dtype, device))
        self._cache: KeyValueCache | None = None
        self._check_eos()
        if self._loaded:
            self._runner.prepare()

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    def load(self, directory: Path) -> None:
        load_weights(self._runner.model, directory)
        if not self._loaded:
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
        self._check_loaded()
        check_temperature(temperature)
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
        self._check_loaded()
        check_temperature(temperature)
        check_scoring(requests, vocab_size=self._runner.vocab_size, max_tokens=self._runner.max_tokens)
        scored: dict[int, Scored] = {}
        for batch in _length_batches(requests, self.prefill_tokens):
            scored.update(zip(batch, self._score_batch([requests[i] for i in batch], temperature), strict=True))
        return [scored[index] for index in range(len(requests))]

    def _score_batch(self, requests: Sequence[ScoreRequest], temperature: float) -> list[Scored]:
        states_ND = self._output_states(requests)
        counts = torch.tensor([len(request.output_tokens) for request in requests])
        seeds = torch.tensor([signed_seed(request.seed) for request in requests]).repeat_interleave(counts)
        positions = torch.cat([torch.arange(count) for count in counts.tolist()])
        tokens = torch.tensor([token for request in requests for token in request.output_tokens])
        inputs_3N = torch.stack([seeds, positions, tokens]).to(states_ND.device)
        margins, logprobs = self._judge(states_ND, inputs_3N, temperature)
        parts = [part.split_with_sizes(counts.tolist()) for part in (margins, logprobs, states_ND.to(torch.bfloat16))]
        return [Scored(margins=m, logprobs=p, states=s) for m, p, s in zip(*parts, strict=True)]

    def _output_states(self, requests: Sequence[ScoreRequest]) -> Tensor:
        """The states that produced the outputs, request after request. The last token is judged, never fed."""
        fed = [(*request.prompt_tokens, *request.output_tokens[:-1]) for request in requests]
        width = max(map(len, fed))
        ids_BS = torch.tensor([list(tokens) + [0] * (width - len(tokens)) for tokens in fed])
        states_BSD, _ = self._runner.prefill(ids_BS.to(self._runner.device), keep=False)
        wanted = [
            torch.arange(len(request.prompt_tokens) - 1, len(tokens)) + row * width
            for row, (request, tokens) in enumerate(zip(requests, fed, strict=True))
        ]
        return states_BSD.flatten(0, 1)[torch.cat(wanted).to(states_BSD.device)]

    def _judge(self, states_ND: Tensor, inputs_3N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        size = max(1, _LOGITS_CHUNK // self._runner.vocab_size)
        judged: list[tuple[Tensor, Tensor]] = []
        for start in range(0, states_ND.shape[0], size):
            logits = self._runner.logits(states_ND[start : start + size])
            seeds, positions, tokens = inputs_3N[:, start : start + size]
            judged.append(token_margins(logits, seeds, positions, tokens, temperature))
        margins, logprobs = zip(*judged, strict=True)
        return torch.cat(margins), torch.cat(logprobs)

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
        plan = MemoryPlan(
            weights_bytes=tensor_bytes(runner.model),
            row_bytes=bytes_per_position(runner.planes, runner.dtype) * capacity,
            available_bytes=available_bytes(runner.device),
        )
        return KeyValueCache(runner.planes, cache_rows(plan, rows), capacity, dtype=runner.dtype, device=runner.device)

    def _check_eos(self) -> None:
        outside = [token for token in self._eos_token_ids if not 0 <= token < self.vocab_size]
        if outside:
            raise ModelError(
                f"The tokenizer does not fit the model: its end token {outside[0]} lies outside of the "
                f"{self.vocab_size} tokens that the model knows."
            )

    def _check_loaded(self) -> None:
        if not self._loaded:
            raise WeightsNotLoadedError(
                "The engine has no weights yet.", hint="Call load() with a policy version first."
            )


def _length_batches(requests: Sequence[ScoreRequest], token_limit: int) -> list[list[int]]:
    """Indices of requests of similar length, each batch within the limit once padded; a longer request is alone."""
    lengths = [len(request.prompt_tokens) + len(request.output_tokens) - 1 for request in requests]
    batches: list[list[int]] = []
    for index in sorted(range(len(requests)), key=lengths.__getitem__):
        if batches and lengths[index] * (len(batches[-1]) + 1) <= token_limit:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
