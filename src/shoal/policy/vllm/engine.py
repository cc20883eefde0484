"""The same engine interface on vLLM: continuous batching, paged cache and tensor parallelism are vLLM's.

Tokens are sampled, states committed and scores computed by `worker` inside the worker process; this half sends requests and puts
the answers in order. Weights are replaced in place from safetensors and the prefix cache is emptied, without a restart; adapters
are vLLM's own (`adapters`). Versions of vLLM that this was not tested with are refused by name.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.config import LoraConfig
from shoal.errors import ShoalError
from shoal.policy.directory import check_vocabulary, has_weights, read_config, weight_files
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
    signed_seed,
)
from shoal.policy.models import check_memory
from shoal.policy.vllm.adapters import VllmAdapters
from shoal.policy.vllm.recorder import ScoredBytes
from shoal.policy.vllm.stream import VllmRequests, VllmStream
from shoal.policy.weights import check_fit
from shoal.protocol.segments import sampled_places

SUPPORTED = "0.32"
_SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core shares this process; workers of one node still get their own
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # custom logits processors belong to the first one
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class VllmError(ShoalError):
    """vLLM is missing, of an unknown version, or refuses the model."""

    code = "vllm"
    permanent = True


class VllmEngine:
    def __init__(
        self,
        model_files: Path,
        *,
        eos_token_ids: Sequence[int],
        dtype: str = "float32",
        max_batch: int = 256,
        max_tokens: int | None = None,
        tensor_parallel: int = 1,
        lora: LoraConfig | None = None,
        **vllm_options: Any,
    ) -> None:
        """`model_files` holds config.json; if it holds safetensors too, they are loaded. `max_tokens` bounds prompt + output. With
        `lora` they are a base that generates nothing before an adapter is loaded."""
        _check_version()
        config = read_config(model_files)
        self._directory = model_files
        self._eos_token_ids = list(eos_token_ids)
        self.vocab_size: int = config.vocab_size
        check_vocabulary(eos_token_ids, self.vocab_size)
        self._model_tokens: int = config.max_position_embeddings
        self.max_tokens = min(max_tokens or self._model_tokens, self._model_tokens)
        self.max_batch = max_batch
        self._stream: VllmStream | None = None
        self._weights = 0
        self._has_weights = self._loaded = has_weights(model_files)
        self._adapters: VllmAdapters | None = None
        if lora is not None:
            weight_files(model_files)  # a base without weights is refused
            self._adapters, self._loaded = VllmAdapters(model_files, lora), False
            vllm_options = {**self._adapters.options, **vllm_options}
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        self._check_memory(config, dtype, tensor_parallel)
        with self._refusals():
            self._llm = self._start(dtype, max_batch, tensor_parallel, vllm_options)
            self._llm.collective_rpc("shoal_install")
            self._requests = VllmRequests(self._llm)
            self._try_out()
        device = self._llm.llm_engine.vllm_config.device_config.device_type
        self.numerics_class = f"vllm/{dtype}/{device}{LORA_CLASS if lora else ''}"

    @property
    def reused_tokens(self) -> int:
        """Tokens of prompts that were in the prefix cache, since the engine started."""
        return self._requests.reused_tokens

    def load(self, directory: Path) -> None:
        if self._requests.unfinished:
            raise EngineBusyError(f"{len(self._requests.unfinished)} requests still run with the old weights.")
        if self._adapters is not None:
            self._adapters.use(self._llm, directory)
            self._requests.adapter = self._adapters.current
        else:
            check_fit(self._directory, directory)
            self._llm.collective_rpc("shoal_load", args=(str(directory),))
            self._llm.reset_prefix_cache()
        self._loaded = True
        self._weights += 1
        if self._stream is not None:
            self._stream.weights = self._weights

    def open(self, *, temperature: float, max_tokens: int, rows: int | None = None) -> VllmStream:
        check_ready(self._loaded, temperature)
        return self._open(temperature, max_tokens, rows)

    def _open(self, temperature: float, max_tokens: int, rows: int | None = None) -> VllmStream:
        if self._stream is not None:
            raise EngineBusyError("The engine has an open stream.")
        self._stream = VllmStream(
            self._requests,
            rows=min(rows or self.max_batch, self.max_batch),
            temperature=temperature,
            eos_token_ids=self._eos_token_ids,
            vocab_size=self.vocab_size,
            max_tokens=min(max_tokens, self.max_tokens),
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
        check_generation(requests, vocab_size=self.vocab_size, max_tokens=self.max_tokens)
        if not requests:
            return []
        with self.open(temperature=temperature, max_tokens=positions_needed(requests)) as stream:
            return generate_all(stream, requests, on_progress)

    def score(self, requests: Sequence[ScoreRequest], *, temperature: float) -> list[Scored]:
        check_ready(self._loaded, temperature)
        check_scoring(requests, vocab_size=self.vocab_size, max_tokens=self.max_tokens)
        if self._stream is not None:
            raise EngineBusyError("The engine has an open stream.")
        with self._requests.dropping_the_rest():
            numbers = [self._add_scoring(request, temperature) for request in requests]
            while self._requests.unfinished:
                for _ in self._requests.step():
                    pass
        scored = self._requests.collect(numbers).scored
        return [
            _scored(scored[number], request.sampled_count) for number, request in zip(numbers, requests, strict=True)
        ]

    def _add_scoring(self, request: ScoreRequest, temperature: float) -> int:
        ours = {
            "seed": signed_seed(request.seed),
            "temperature": temperature,
            "position": len(request.prompt_tokens) - 1,
            "places": sampled_places(request.lengths),
        }
        options = {"max_tokens": 1, "prompt_logprobs": 0}
        return self._requests.add((*request.prompt_tokens, *request.output_tokens), options, ours)

    def _check_memory(self, config: Any, dtype: str, tensor_parallel: int) -> None:
        """On a GPU the cache takes what vLLM's own share leaves over; on the CPU it is reserved ahead."""
        if torch.cuda.is_available():
            check_memory(config, self._directory, dtype, "cuda", parts=tensor_parallel)
        else:
            cache_bytes = int(float(os.environ["VLLM_CPU_KVCACHE_SPACE"]) * (1 << 30))
            check_memory(config, self._directory, dtype, "cpu", cache_bytes=cache_bytes * tensor_parallel)

    def _start(self, dtype: str, max_batch: int, tensor_parallel: int, options: dict[str, Any]) -> Any:
        from vllm import LLM

        positions = self.max_tokens + 1  # scoring samples one token after the last
        overrides: dict[str, Any] = {"head_dtype": "float32"}  # as the embedded engine: see its `head`
        if positions > self._model_tokens:
            overrides["max_position_embeddings"] = positions
        return LLM(
            str(self._directory),
            skip_tokenizer_init=True,
            load_format="auto" if self._has_weights else "dummy",
            generation_config="vllm",
            dtype=dtype,
            max_model_len=positions,
            hf_overrides=overrides,
            max_num_seqs=max_batch,
            max_num_batched_tokens=max(positions, 8192),
            tensor_parallel_size=tensor_parallel,
            enable_chunked_prefill=False,
            enable_prefix_caching=True,  # the next turn of an episode reads only what is new
            async_scheduling=False,
            worker_extension_cls="shoal.policy.vllm.worker.WorkerExtension",
            logits_processors=["shoal.policy.vllm.worker:SeededSampling"],
            disable_log_stats=True,
            # Compiling pays on a GPU only.
            **{"enforce_eager": not torch.cuda.is_available(), **options},
        )

    def _try_out(self) -> None:
        """Two tokens, so that a model whose kernels vLLM lacks is refused now and not in the middle of a run."""
        with self._open(1.0, self.max_tokens) as stream:
            generate_all(stream, [GenerationRequest((0,), 0, 2)], None)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, RuntimeError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            raise VllmError(f"vLLM cannot run the model in {self._directory}: {reason}") from error


def _scored(parts: ScoredBytes, count: int) -> Scored:
    margins, logprobs, rivals = (
        torch.from_numpy(np.frombuffer(data, np.float32).copy())
        for data in (parts.margins, parts.logprobs, parts.rivals)
    )
    states = torch.from_numpy(np.frombuffer(parts.states, np.int16).copy()).view(torch.bfloat16)
    return Scored(margins, logprobs, states.view(count, -1), rivals.view(count, -1))


def _check_version() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise VllmError("vLLM is not installed.", hint="Install it with `pip install shoal[vllm]`.")
    from vllm import __version__ as version

    if not version.startswith(f"{SUPPORTED}."):
        raise VllmError(f"vLLM {version} is not supported.", hint=f"Supported: {SUPPORTED}.x.")
