"""The open stream of a vLLM engine: numbers requests, feeds vLLM's scheduler, and joins its tokens with what the worker recorded.

vLLM decides which of its requests run; more than its rows wait inside it. A request that is dropped is aborted in vLLM and
forgotten by the recorder, so that neither keeps anything of it. Later turns of an episode find the tokens before them in vLLM's own
prefix cache.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from shoal.policy.engine import Carry, Completion, GenerationRequest, check_carries, check_generation, signed_seed
from shoal.policy.vllm.recorder import Collected
from shoal.proofs.commitments import CHUNK_TOKENS


class VllmRequests:
    """Requests of one vLLM instance, by number."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._numbers = 0
        self.adapter: Any = None
        """Goes with every request, where the engine serves an adapter."""
        self.unfinished: set[int] = set()
        self.reused_tokens = 0
        """Of prompts, that vLLM found in its prefix cache."""

    def add(self, tokens: Sequence[int], options: dict[str, Any], ours: dict[str, Any]) -> int:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        number = self._numbers
        self._numbers += 1
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"shoal": {**ours, "number": number}},
            **options,
        )
        params.output_kind = RequestOutputKind.FINAL_ONLY
        self._llm.llm_engine.add_request(str(number), tokens_input(list(tokens)), params, lora_request=self.adapter)
        self.unfinished.add(number)
        return number

    def step(self) -> Iterator[tuple[int, Any]]:
        """Number and output of each request that ended with this step."""
        for output in self._llm.llm_engine.step():
            number = int(output.request_id)
            self.unfinished.discard(number)
            self.reused_tokens += output.num_cached_tokens or 0
            yield number, output.outputs[0]

    def collect(self, numbers: Sequence[int]) -> Collected:
        collected: Collected = self._llm.collective_rpc("shoal_collect", args=(list(numbers),))[0]
        return collected

    def drop(self, numbers: Collection[int]) -> None:
        dropped = sorted(self.unfinished.intersection(numbers))
        if dropped:
            self._llm.llm_engine.abort_request([str(number) for number in dropped])
            self.unfinished.difference_update(dropped)
            self.collect(dropped)

    @contextmanager
    def dropping_the_rest(self) -> Iterator[None]:
        """Drops what is unfinished when the block ends, as after an interrupt."""
        try:
            yield
        finally:
            self.drop(list(self.unfinished))


class VllmStream:
    def __init__(
        self,
        requests: VllmRequests,
        *,
        rows: int,
        temperature: float,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        max_tokens: int,
        weights: int,
        on_close: Callable[[], None],
    ) -> None:
        self._requests, self.rows, self.generated = requests, rows, 0
        self._temperature, self._eos_token_ids = temperature, list(eos_token_ids)
        self._vocab_size, self._max_tokens = vocab_size, max_tokens
        self._on_close = on_close
        self.weights = weights
        self._keeping: dict[int, int] = {}

    @property
    def unfinished(self) -> int:
        return len(self._requests.unfinished)

    def __enter__(self) -> "VllmStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.cancel(list(self._requests.unfinished))
        self._on_close()

    def submit(self, requests: Sequence[GenerationRequest]) -> list[int]:
        check_generation(requests, vocab_size=self._vocab_size, max_tokens=self._max_tokens)
        check_carries(requests, self.weights)
        return [self._add(request) for request in requests]

    def _add(self, request: GenerationRequest) -> int:
        options = {"max_tokens": request.max_new_tokens, "stop_token_ids": self._eos_token_ids}
        carried = request.carry.states.contiguous().view(torch.int16).numpy().tobytes() if request.carry else b""
        ours = {
            "seed": signed_seed(request.seed),
            "temperature": self._temperature,
            "first": request.first_index,
            "carried": carried,
        }
        number = self._requests.add(request.prompt_tokens, options, ours)
        if request.keeps:
            self._keeping[number] = request.first_index
        return number

    def step(self) -> list[tuple[int, Completion]]:
        if not self._requests.unfinished:
            return []
        ended = dict(self._requests.step())
        if not ended:
            return []
        recorded = self._requests.collect(list(ended)).recorded
        self.generated += sum(len(output.token_ids) for output in ended.values())
        return [
            (
                number,
                Completion(
                    tokens=list(output.token_ids),
                    logprobs=recorded[number].logprobs,
                    finish_reason=output.finish_reason,
                    proofs=recorded[number].proofs,
                    carry=self._carry(number, len(output.token_ids), recorded[number].tail),
                ),
            )
            for number, output in ended.items()
        ]

    def _carry(self, number: int, tokens: int, tail: bytes) -> Carry | None:
        first = self._keeping.pop(number, None)
        if first is None:
            return None
        sampled = first + tokens
        values = (
            torch.frombuffer(bytearray(tail), dtype=torch.bfloat16) if tail else torch.zeros(0, dtype=torch.bfloat16)
        )
        return Carry(sampled, values.view(sampled % CHUNK_TOKENS, -1) if tail else values.view(0, 1), self.weights)

    def cancel(self, numbers: Collection[int]) -> None:
        self._requests.drop(numbers)
