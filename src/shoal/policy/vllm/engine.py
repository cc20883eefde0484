"""The same engine interface on vLLM: continuous batching, paged cache and tensor parallelism are vLLM's.

Tokens are sampled, states committed and scores computed by `worker` inside the worker process; this half sends requests and puts
the answers in order. Weights are replaced in place from safetensors and the prefix cache is emptied, without a restart. Versions of
vLLM that this was not tested with are refused by name.
"""

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.errors import ShoalError
from shoal.policy.directory import check_vocabulary, has_weights, read_config
from shoal.policy.engine import (
    Completion,
    GenerationRequest,
    Scored,
    ScoreRequest,
    check_generation,
    check_ready,
    check_scoring,
    signed_seed,
)
from shoal.policy.models import check_memory
from shoal.policy.vllm.recorder import Collected, ScoredBytes
from shoal.policy.weights import check_fit

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
        **vllm_options: Any,
    ) -> None:
        """`model_files` holds config.json; if it holds safetensors too, they are loaded. `max_tokens` bounds prompt + output."""
        _check_version()
        config = read_config(model_files)
        self._directory = model_files
        self._eos_token_ids = list(eos_token_ids)
        self.vocab_size: int = config.vocab_size
        check_vocabulary(eos_token_ids, self.vocab_size)
        self._model_tokens: int = config.max_position_embeddings
        self.max_tokens = min(max_tokens or self._model_tokens, self._model_tokens)
        self._loaded = has_weights(model_files)
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        self._check_memory(config, dtype, tensor_parallel)
        with self._refusals():
            self._llm = self._start(dtype, max_batch, tensor_parallel, vllm_options)
            self._llm.collective_rpc("shoal_install")
            self._try_out()
        self.numerics_class = f"vllm/{dtype}/{self._llm.llm_engine.vllm_config.device_config.device_type}"

    def load(self, directory: Path) -> None:
        check_fit(self._directory, directory)
        self._llm.collective_rpc("shoal_load", args=(str(directory),))
        self._llm.reset_prefix_cache()
        self._loaded = True

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        temperature: float,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        check_ready(self._loaded, temperature)
        check_generation(requests, vocab_size=self.vocab_size, max_tokens=self.max_tokens)
        completions = [Completion() for _ in requests]
        generated = 0
        for index, output in self._run(self._generation_work(requests, temperature)):
            completions[index].tokens = list(output.token_ids)
            completions[index].finish_reason = output.finish_reason
            generated += len(output.token_ids)
            if on_progress is not None:
                on_progress(generated)
        for index, recorded in self._collect().recorded.items():
            completions[index].logprobs, completions[index].proofs = recorded.logprobs, recorded.proofs
        return completions

    def score(self, requests: Sequence[ScoreRequest], *, temperature: float) -> list[Scored]:
        check_ready(self._loaded, temperature)
        check_scoring(requests, vocab_size=self.vocab_size, max_tokens=self.max_tokens)
        for _ in self._run(self._scoring_work(requests, temperature)):
            pass
        scored = self._collect().scored
        return [_scored(scored[index], len(request.output_tokens)) for index, request in enumerate(requests)]

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
        return LLM(
            str(self._directory),
            skip_tokenizer_init=True,
            load_format="auto" if self._loaded else "dummy",
            generation_config="vllm",
            dtype=dtype,
            max_model_len=positions,
            hf_overrides={"max_position_embeddings": positions} if positions > self._model_tokens else {},
            max_num_seqs=max_batch,
            max_num_batched_tokens=max(positions, 8192),
            tensor_parallel_size=tensor_parallel,
            enable_chunked_prefill=False,
            async_scheduling=False,
            worker_extension_cls="shoal.policy.vllm.worker.WorkerExtension",
            logits_processors=["shoal.policy.vllm.worker:SeededSampling"],
            disable_log_stats=True,
            # Compiling pays on a GPU only.
            **{"enforce_eager": not torch.cuda.is_available(), **options},
        )

    def _try_out(self) -> None:
        """Two tokens, so that a model whose kernels vLLM lacks is refused now and not in the middle of a run."""
        for _ in self._run(self._generation_work([GenerationRequest((0,), 0, 2)], 1.0)):
            pass
        self._collect()

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, RuntimeError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            raise VllmError(f"vLLM cannot run the model in {self._directory}: {reason}") from error

    def _generation_work(self, requests: Sequence[GenerationRequest], temperature: float) -> Iterable[tuple[Any, Any]]:
        from vllm import SamplingParams

        for index, request in enumerate(requests):
            ours = {"index": index, "seed": signed_seed(request.seed), "temperature": temperature}
            yield (
                request.prompt_tokens,
                SamplingParams(
                    temperature=0.0,
                    max_tokens=request.max_new_tokens,
                    stop_token_ids=self._eos_token_ids,
                    ignore_eos=True,
                    detokenize=False,
                    extra_args={"shoal": ours},
                ),
            )

    def _scoring_work(self, requests: Sequence[ScoreRequest], temperature: float) -> Iterable[tuple[Any, Any]]:
        from vllm import SamplingParams

        for index, request in enumerate(requests):
            ours = {
                "index": index,
                "seed": signed_seed(request.seed),
                "temperature": temperature,
                "position": len(request.prompt_tokens) - 1,
            }
            yield (
                (*request.prompt_tokens, *request.output_tokens),
                SamplingParams(
                    temperature=0.0,
                    max_tokens=1,
                    prompt_logprobs=0,
                    ignore_eos=True,
                    detokenize=False,
                    extra_args={"shoal": ours},
                ),
            )

    def _run(self, work: Iterable[tuple[Any, Any]]) -> Iterable[tuple[int, Any]]:
        """Yield (index, output) as requests finish; whatever is left when the caller stops is aborted."""
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        unfinished: set[str] = set()
        try:
            for index, (tokens, params) in enumerate(work):
                params.output_kind = RequestOutputKind.FINAL_ONLY
                engine.add_request(str(index), tokens_input(list(tokens)), params)
                unfinished.add(str(index))
            while engine.has_unfinished_requests():
                for output in engine.step():
                    unfinished.discard(output.request_id)
                    yield int(output.request_id), output.outputs[0]
        finally:
            if unfinished:
                engine.abort_request(sorted(unfinished))
                self._collect()

    def _collect(self) -> Collected:
        collected: Collected = self._llm.collective_rpc("shoal_collect")[0]
        return collected


def _scored(parts: ScoredBytes, count: int) -> Scored:
    margins, logprobs = (
        torch.from_numpy(np.frombuffer(data, np.float32).copy()) for data in (parts.margins, parts.logprobs)
    )
    states = torch.from_numpy(np.frombuffer(parts.states, np.int16).copy()).view(torch.bfloat16)
    return Scored(margins=margins, logprobs=logprobs, states=states.view(count, -1))


def _check_version() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise VllmError("vLLM is not installed.", hint="Install it with `pip install shoal[vllm]`.")
    from vllm import __version__ as version

    if not version.startswith(f"{SUPPORTED}."):
        raise VllmError(f"vLLM {version} is not supported.", hint=f"Supported: {SUPPORTED}.x.")
